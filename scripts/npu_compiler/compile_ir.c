/* Compiles an OpenVINO IR of fixed shapes for an Intel NPU that need not be present, and writes what is compiled.
 *
 *   compile_ir MODEL.xml BLOB PLATFORM [KEY=VALUE ...]
 *
 * PLATFORM is 3720, 4000 or 5010; further words are the plugin's own properties. Everything that the compiler says goes
 * to standard output. Exit status 0: the blob is written. Built against the C headers of OpenVINO's wheel.
 */
#include <stdio.h>
#include <string.h>
#include "openvino/c/openvino.h"

#define MOST_WORDS 8

static int report(const char *step, ov_status_e status) {
    if (status != OK) printf("[ERROR] cannot %s: %s %s\n", step, ov_get_error_info(status), ov_get_last_err_msg());
    return status != OK;
}

int main(int count, char **words) {
    const char *properties[2 * MOST_WORDS] = {0};
    ov_core_t *core = NULL;
    ov_model_t *model = NULL;
    ov_compiled_model_t *compiled = NULL;
    ov_version_t version;
    int i;

    if (count < 4 || count > 4 + MOST_WORDS) {
        fprintf(stderr, "usage: compile_ir MODEL.xml BLOB PLATFORM [KEY=VALUE ...]\n");
        return 2;
    }
    setvbuf(stdout, NULL, _IONBF, 0);
    for (i = 4; i < count; i++) {
        char *equals = strchr(words[i], '=');
        if (!equals) return 2;
        *equals = '\0';
        properties[2 * (i - 4)] = words[i];
        properties[2 * (i - 4) + 1] = equals + 1;
    }
    if (ov_get_openvino_version(&version) == OK) printf("OpenVINO %s\n", version.buildNumber);
    if (report("start OpenVINO", ov_core_create(&core))) return 1;
    if (report("read the model", ov_core_read_model(core, words[1], NULL, &model))) return 1;
    /* A key that is NULL ends the list: only as many as were given are counted. */
#define P(n) properties[2 * (n)], properties[2 * (n) + 1]
    if (report("compile", ov_core_compile_model(core, model, "NPU", 6 + 2 * (size_t)(count - 4), &compiled, "NPU_PLATFORM",
                                                words[3], "NPU_COMPILER_TYPE", "PLUGIN", "LOG_LEVEL", "LOG_INFO", P(0), P(1),
                                                P(2), P(3), P(4), P(5), P(6), P(7))))
        return 1;
    return report("write the blob", ov_compiled_model_export_model(compiled, words[2]));
}
