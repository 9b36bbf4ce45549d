/* A virtual TPU: a library that frameworks load as libtpu.so, with the devices of one TPU host on this machine's CPU.
 *
 * It offers what libtpu offers, GetPjrtApi, by loading a CPU plugin of the PJRT C API
 * (https://github.com/openxla/xla/blob/main/xla/pjrt/c/pjrt_c_api.h) and replacing two functions of its table:
 *
 *   PJRT_Client_Create             creates as many CPU devices as the TPU_* variables describe, and drops all options:
 *                                  they are a TPU's
 *   PJRT_LoadedExecutable_Execute  copies PJRT_ExecuteOptions into the plugin's longer struct and zeroes its further
 *                                  fields: torch_xla 2.9 was built with API 0.7x
 *
 * Collectives are those of the CPU client, inside one process: one host, any number of devices. The struct offsets below
 * belong to the plugin version that images/virtual-tpu pins; the library refuses a plugin with another API version.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <libgen.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { API_MAJOR = 0, API_MINOR = 115, API_SIZE = 1144 };

typedef struct Error Error; /* PJRT_Error of the plugin, passed through */

struct ApiVersion {
    size_t struct_size;
    void *extension_start;
    int major, minor;
};

/* The table begins with its size, an extension list and its version. Function pointers start at byte 40. */
struct Api {
    size_t struct_size;
    void *extension_start;
    struct ApiVersion version;
    void *functions[(API_SIZE - 40) / 8];
};

enum { CLIENT_CREATE = 10, LOADED_EXECUTABLE_EXECUTE = 55 }; /* indices into the table, from 0 */

enum { NAMED_VALUE_INT64 = 1 }; /* of PJRT_NamedValue_Type */

struct NamedValue { /* PJRT_NamedValue */
    size_t struct_size;
    void *extension_start;
    const char *name;
    size_t name_size;
    int type;
    int64_t int64_value; /* of a union */
    size_t value_size;
};

struct ClientCreateArgs { /* PJRT_Client_Create_Args, up to the fields that change */
    size_t struct_size;
    void *extension_start;
    const struct NamedValue *create_options;
    size_t num_options;
};

struct ExecuteOptions { /* PJRT_ExecuteOptions of API_MINOR */
    size_t struct_size;
    void *extension_start;
    void *send_callbacks, *recv_callbacks;
    size_t num_send_ops, num_recv_ops;
    int launch_id;
    const int64_t *non_donatable_input_indices;
    size_t num_non_donatable_input_indices;
    void *context;
    const char *call_location;
    size_t num_tasks;
    int *task_ids;
    int64_t *incarnation_ids;
};

struct ExecuteArgs { /* PJRT_LoadedExecutable_Execute_Args, up to the field that changes */
    size_t struct_size;
    void *extension_start;
    void *executable;
    struct ExecuteOptions *options;
};

_Static_assert(offsetof(struct Api, functions) == 40, "functions begin behind the version");
_Static_assert(sizeof(struct Api) == API_SIZE, "the table has the size that the version has");
_Static_assert(offsetof(struct NamedValue, int64_value) == 40, "the union is aligned to 8 bytes");
_Static_assert(offsetof(struct ClientCreateArgs, num_options) == 24, "options come third");
_Static_assert(offsetof(struct ExecuteOptions, call_location) == 80, "the older struct ends before call_location");
_Static_assert(sizeof(struct ExecuteOptions) == 112, "the newer struct ends after incarnation_ids");
_Static_assert(offsetof(struct ExecuteArgs, options) == 24, "the options come fourth");

static struct Api table;
static Error *(*create)(struct ClientCreateArgs *);
static Error *(*execute)(struct ExecuteArgs *);
static int64_t devices;

static void refuse(const char *what, const char *why) {
    fprintf(stderr, "virtual TPU: %s: %s\n", what, why);
    exit(70);
}

/* Returns the product of bounds such as "2,2,1"; 0 when they are missing or malformed. */
static int64_t product(const char *bounds) {
    int64_t result = 1;
    for (const char *at = bounds; at && *at;) {
        char *end;
        long number = strtol(at, &end, 10);
        if (end == at || number < 1 || (*end && *end != ',')) return 0;
        result *= number;
        at = *end ? end + 1 : end;
    }
    return bounds && *bounds ? result : 0;
}

/* Counts devices as libtpu does: each core of a chip on v2 and v3, each chip from v4 on. */
static int64_t count_devices(void) {
    const char *type = getenv("TPU_ACCELERATOR_TYPE");
    if (!type) refuse("TPU_ACCELERATOR_TYPE", "is not set; it decides the number of devices");
    if (product(getenv("TPU_PROCESS_BOUNDS")) != 1) refuse("TPU_PROCESS_BOUNDS", "must be 1,1,1: a virtual TPU has one host");
    int64_t chips = product(getenv("TPU_CHIPS_PER_PROCESS_BOUNDS"));
    if (chips == 0) refuse("TPU_CHIPS_PER_PROCESS_BOUNDS", "must be the chips of this host along each axis, for example 2,2,1");
    return chips * (strncmp(type, "v2-", 3) == 0 || strncmp(type, "v3-", 3) == 0 ? 2 : 1);
}

static Error *create_with_devices(struct ClientCreateArgs *args) {
    static const char name[] = "cpu_device_count";
    struct NamedValue count = {sizeof count, NULL, name, sizeof name - 1, NAMED_VALUE_INT64, devices, 1};
    const struct NamedValue *options = args->create_options;
    size_t number = args->num_options;
    args->create_options = &count;
    args->num_options = 1;
    Error *error = create(args);
    args->create_options = options;
    args->num_options = number;
    return error;
}

static Error *execute_with_options(struct ExecuteArgs *args) {
    struct ExecuteOptions longer = {0}, *given = args->options;
    memcpy(&longer, given, given->struct_size < sizeof longer ? given->struct_size : sizeof longer);
    longer.struct_size = sizeof longer;
    args->options = &longer;
    Error *error = execute(args);
    args->options = given;
    return error;
}

/* Loads the plugin beside this library. Exits when it is missing or of another version. */
static const struct Api *load_plugin(void) {
    Dl_info self;
    if (!dladdr((void *)&product, &self)) refuse("libtpu.so", "its own path is unknown");
    char path[4096], copy[4096];
    snprintf(copy, sizeof copy, "%s", self.dli_fname);
    snprintf(path, sizeof path, "%s/pjrt_c_api_cpu_plugin.so", dirname(copy));
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) refuse(path, dlerror());
    const struct Api *(*get)(void) = (const struct Api *(*)(void))dlsym(library, "GetPjrtApi");
    if (!get) refuse(path, "has no GetPjrtApi: it is no plugin of the PJRT C API");
    const struct Api *api = get();
    if (api->version.major != API_MAJOR || api->version.minor != API_MINOR || api->struct_size != API_SIZE) {
        char why[200];
        snprintf(why, sizeof why, "has PJRT C API %d.%d with a table of %zu bytes, and this library was written for %d.%d with %d",
                 api->version.major, api->version.minor, api->struct_size, API_MAJOR, API_MINOR, API_SIZE);
        refuse(path, why);
    }
    return api;
}

const struct Api *GetPjrtApi(void) {
    if (!table.struct_size) {
        devices = count_devices();
        table = *load_plugin();
        create = (Error * (*)(struct ClientCreateArgs *)) table.functions[CLIENT_CREATE];
        execute = (Error * (*)(struct ExecuteArgs *)) table.functions[LOADED_EXECUTABLE_EXECUTE];
        table.functions[CLIENT_CREATE] = (void *)create_with_devices;
        table.functions[LOADED_EXECUTABLE_EXECUTE] = (void *)execute_with_options;
    }
    return &table;
}
