/* What libtpu.c and processes.c share: structs of the PJRT C API, the plugin's table, and the processes of a slice. */
#ifndef VIRTUAL_TPU_PJRT_H
#define VIRTUAL_TPU_PJRT_H

#include <stddef.h>
#include <stdint.h>

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

enum { /* indices into the table, from 0 */
    ERROR_DESTROY = 0, ERROR_MESSAGE = 1, ERROR_CODE = 2, EVENT_DESTROY = 5, EVENT_IS_READY = 6, EVENT_AWAIT = 8, CLIENT_CREATE = 10,
    PROCESS_INDEX = 13, DEVICES = 15, ADDRESSABLE_DEVICES = 16, LOOKUP_ADDRESSABLE_DEVICE = 18, FROM_HOST_BUFFER = 22,
    DESCRIPTION_ID = 23, DESCRIPTION_PROCESS_INDEX = 24, IS_ADDRESSABLE = 30, LOCAL_HARDWARE_ID = 31, EXECUTABLE_DESTROY = 40,
    NUM_REPLICAS = 42, NUM_PARTITIONS = 43, NUM_OUTPUTS = 44, OPTIMIZED_PROGRAM = 48, LOADED_EXECUTABLE_DESTROY = 50,
    GET_EXECUTABLE = 51, EXECUTABLE_ADDRESSABLE_DEVICES = 52, LOADED_EXECUTABLE_EXECUTE = 55, DESERIALIZE = 56, BUFFER_DESTROY = 58,
    BUFFER_TYPE = 59, BUFFER_DIMENSIONS = 60, TO_HOST_BUFFER = 70, READY_EVENT = 72, EVENT_CREATE = 126, EVENT_SET = 127
};

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

struct ClientCreateArgs { /* PJRT_Client_Create_Args, up to the result */
    size_t struct_size;
    void *extension_start;
    const struct NamedValue *create_options;
    size_t num_options;
    void *key_value_store[4];
    void *client;
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

struct ExecuteArgs { /* PJRT_LoadedExecutable_Execute_Args */
    size_t struct_size;
    void *extension_start;
    void *executable;
    struct ExecuteOptions *options;
    void **const *argument_lists; /* [device][argument] */
    size_t num_devices, num_args;
    void **const *output_lists; /* [device][output] */
    void **device_complete_events;
    void *execute_device;
};

struct ObjectArgs { /* of many functions: they take an object, and return one or a number */
    size_t struct_size;
    void *extension_start;
    void *object, *result;
};

struct ValueArgs { /* of functions that return a number or a flag of an object */
    size_t struct_size;
    void *extension_start;
    void *object;
    union { int number; char flag; };
};

struct LookupArgs { /* PJRT_Client_LookupAddressableDevice_Args */
    size_t struct_size;
    void *extension_start;
    void *client;
    int local_hardware_id;
    void *device;
};

enum { ONE_OBJECT = offsetof(struct ObjectArgs, result) }; /* the size for functions that return nothing */

struct ListArgs { /* of functions that take an object and return several, or a buffer's dimensions */
    size_t struct_size;
    void *extension_start;
    void *object, *list;
    size_t length;
};

struct FromHostArgs { /* PJRT_Client_BufferFromHostBuffer_Args */
    size_t struct_size;
    void *extension_start;
    void *client;
    const void *data;
    int type;
    const int64_t *dimensions;
    size_t num_dimensions;
    const int64_t *byte_strides;
    size_t num_byte_strides;
    int semantics;
    void *device, *memory, *layout, *done_event, *buffer;
};

struct Program { /* PJRT_Program */
    size_t struct_size;
    void *extension_start;
    char *code;
    size_t code_size;
    const char *format;
    size_t format_size;
};

struct ToHostArgs { /* PJRT_Buffer_ToHostBuffer_Args */
    size_t struct_size;
    void *extension_start;
    void *buffer, *layout, *destination;
    size_t size;
    void *event;
};

struct DeserializeArgs { /* PJRT_Executable_DeserializeAndLoad_Args, up to the result */
    size_t struct_size;
    void *extension_start;
    void *client;
    const char *serialized;
    size_t size;
    void *executable;
};

struct MessageArgs { /* PJRT_Error_Message_Args; PJRT_Error_GetCode_Args ends with the code */
    size_t struct_size;
    void *extension_start;
    Error *error;
    union { const char *text; int code; };
    size_t size;
};

struct EventSetArgs { /* PJRT_Event_Set_Args */
    size_t struct_size;
    void *extension_start;
    void *event;
    int code;
    const char *text;
    size_t size;
};

_Static_assert(offsetof(struct Api, functions) == 40, "functions begin behind the version");
_Static_assert(sizeof(struct Api) == API_SIZE, "the table has the size that the version has");
_Static_assert(offsetof(struct NamedValue, int64_value) == 40, "the union is aligned to 8 bytes");
_Static_assert(offsetof(struct ClientCreateArgs, client) == 64, "four fields of a key-value store come before the client");
_Static_assert(offsetof(struct ExecuteOptions, call_location) == 80, "the older struct ends before call_location");
_Static_assert(sizeof(struct ExecuteOptions) == 112, "the newer struct ends after incarnation_ids");
_Static_assert(offsetof(struct ExecuteArgs, options) == 24, "the options come fourth");
_Static_assert(offsetof(struct FromHostArgs, buffer) == 112, "the buffer comes last");

typedef Error *Function(void *args);

extern struct Api plugin; /* the CPU plugin's own table */

void refuse(const char *what, const char *why) __attribute__((noreturn));
void call(int place, void *args);

/* processes.c */
extern int num_processes; /* each has one device; 1: one process with all devices of the host */
void find_processes(void);
void show_own_device(struct Api *table);
void join_processes(void *client);
Error *execute_replicated(struct ExecuteArgs *args);

#endif
