/* A Vulkan driver in front of a software one: the same device, without subgroup operations.
 *
 * A software Vulkan has subgroups of four lanes. ONNX Runtime's attention kernels take at least sixteen for granted
 * wherever subgroups are offered, and compute wrong numbers with fewer; without them it takes kernels that need none.
 *
 * gcc -shared -fPIC -o without_subgroups.so without_subgroups.c -ldl
 * The driver behind is the library that SOFTWARE_VULKAN names.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef void (*Function)(void);
typedef Function (*GetProcAddr)(void *instance, const char *name);
typedef void (*GetProperties2)(void *device, void *properties);

typedef struct Header {
    int32_t type;
    struct Header *next;
} Header;

/* VkPhysicalDeviceSubgroupProperties, and how VkPhysicalDeviceVulkan11Properties begins to differ from it. */
enum { SUBGROUP_PROPERTIES = 1000094000, VULKAN_11_PROPERTIES = 50 };
typedef struct {
    Header header;
    uint32_t size, stages, operations, quad;
} Subgroups;
typedef struct {
    Header header;
    uint8_t device[16], driver[16], luid[8];
    uint32_t node_mask, luid_valid, size, stages, operations, quad;
} Vulkan11;

static GetProcAddr behind;
static GetProperties2 true_properties;

static Function driver(const char *symbol) {
    static void *library;
    if (library == NULL) library = dlopen(getenv("SOFTWARE_VULKAN"), RTLD_NOW | RTLD_LOCAL);
    return library == NULL ? NULL : (Function)dlsym(library, symbol);
}

static void properties(void *device, void *answer) {
    true_properties(device, answer);
    for (Header *part = answer; part != NULL; part = part->next) {
        if (part->type == SUBGROUP_PROPERTIES) ((Subgroups *)part)->stages = ((Subgroups *)part)->operations = 0;
        if (part->type == VULKAN_11_PROPERTIES) ((Vulkan11 *)part)->stages = ((Vulkan11 *)part)->operations = 0;
    }
}

__attribute__((visibility("default"))) Function vk_icdGetInstanceProcAddr(void *instance, const char *name) {
    if (behind == NULL) behind = (GetProcAddr)driver("vk_icdGetInstanceProcAddr");
    if (behind == NULL) return NULL;
    Function found = behind(instance, name);
    if (found != NULL && strncmp(name, "vkGetPhysicalDeviceProperties2", 30) == 0) {
        true_properties = (GetProperties2)found;
        return (Function)properties;
    }
    return found;
}

__attribute__((visibility("default"))) int32_t vk_icdNegotiateLoaderICDInterfaceVersion(uint32_t *version) {
    int32_t (*negotiate)(uint32_t *) = (int32_t (*)(uint32_t *))driver("vk_icdNegotiateLoaderICDInterfaceVersion");
    if (negotiate == NULL) return -3; /* VK_ERROR_INITIALIZATION_FAILED */
    return negotiate(version);
}

__attribute__((visibility("default"))) Function vk_icdGetPhysicalDeviceProcAddr(void *instance, const char *name) {
    GetProcAddr found = (GetProcAddr)driver("vk_icdGetPhysicalDeviceProcAddr");
    if (strncmp(name, "vkGetPhysicalDeviceProperties2", 30) == 0) return vk_icdGetInstanceProcAddr(instance, name);
    return found == NULL ? NULL : found(instance, name);
}
