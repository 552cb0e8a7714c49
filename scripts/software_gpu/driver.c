/* A Vulkan driver in front of a software one: the same device, without subgroup operations, and one that can be lost.
 *
 * A software Vulkan has subgroups of four lanes. ONNX Runtime's attention kernels take at least sixteen for granted
 * wherever subgroups are offered, and compute wrong numbers with fewer; without them it takes kernels that need none.
 *
 * As soon as the file that LOSE_DEVICE names exists, the device takes no more work: VK_ERROR_DEVICE_LOST, as a graphics
 * card says that was pulled out or whose driver was started anew.
 *
 * gcc -shared -fPIC -o driver.so driver.c -ldl
 * The driver behind is the library that SOFTWARE_VULKAN names.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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

typedef int32_t (*Submit)(void *queue, uint32_t count, const void *submits, uint64_t fence);
enum { DEVICE_LOST = -4 };

static GetProcAddr behind, true_device_functions;
static GetProperties2 true_properties;
static Submit true_submit;

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

static int32_t submit(void *queue, uint32_t count, const void *submits, uint64_t fence) {
    const char *sign = getenv("LOSE_DEVICE");
    if (sign != NULL && access(sign, F_OK) == 0) return DEVICE_LOST;
    return true_submit(queue, count, submits, fence);
}

static Function device_functions(void *device, const char *name) {
    Function found = true_device_functions(device, name);
    if (found == NULL || strcmp(name, "vkQueueSubmit") != 0) return found;
    true_submit = (Submit)found;
    return (Function)submit;
}

__attribute__((visibility("default"))) Function vk_icdGetInstanceProcAddr(void *instance, const char *name) {
    if (behind == NULL) behind = (GetProcAddr)driver("vk_icdGetInstanceProcAddr");
    if (behind == NULL) return NULL;
    Function found = behind(instance, name);
    if (found != NULL && strncmp(name, "vkGetPhysicalDeviceProperties2", 30) == 0) {
        true_properties = (GetProperties2)found;
        return (Function)properties;
    }
    if (found != NULL && strcmp(name, "vkGetDeviceProcAddr") == 0) {
        true_device_functions = (GetProcAddr)found;
        return (Function)device_functions;
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
