/* A virtual TPU: a library that frameworks load as libtpu.so, with the devices of one TPU host on this machine's CPU.
 *
 * It offers what libtpu offers, GetPjrtApi, by loading a CPU plugin of the PJRT C API
 * (https://github.com/openxla/xla/blob/main/xla/pjrt/c/pjrt_c_api.h) and replacing two functions of its table:
 *
 *   PJRT_Client_Create             creates as many CPU devices as the TPU_* variables describe, or else the metadata server's
 *                                  attribute tpu-env, and drops all options: they are a TPU's
 *   PJRT_LoadedExecutable_Execute  copies PJRT_ExecuteOptions into the plugin's longer struct and zeroes its further
 *                                  fields: torch_xla 2.9 was built with API 0.7x
 *
 * Collectives are those of the CPU client, inside one process: one host, any number of devices. Several processes with one device
 * each, on one host or several, exchange data by processes.c. The struct offsets in pjrt.h belong to the plugin version that
 * images/virtual-tpu pins; the library refuses a plugin with another API version.
 *
 * Tests and benchmarks choose with these variables what else differs from the plugin; without them nothing does:
 *
 *   VIRTUAL_TPU_STEP_MS   an execution occupies the devices for this long, in the order of the calls, as on a TPU: Execute returns
 *                         as soon as the plugin's does, and events of results and of copies to the host become ready at the end
 *   VIRTUAL_TPU_LOG       a file that gets a line for each such execution when it ends: the times of the call, of the beginning and
 *                         of the end, in nanoseconds of CLOCK_MONOTONIC
 *   VIRTUAL_TPU_FAULT     executions of programs that were loaded, not compiled: "fail" or "hang"
 */
#define _GNU_SOURCE
#include "pjrt.h"
#include <dlfcn.h>
#include <libgen.h>
#include <netdb.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

struct Api plugin;
static struct Api table;
static Error *(*create)(struct ClientCreateArgs *);
static Error *(*execute)(struct ExecuteArgs *);
static int64_t devices;

void refuse(const char *what, const char *why) {
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

enum { METADATA_SECONDS = 10, MOST_METADATA = 1 << 16 };

/* Returns what the metadata server of a TPU VM answers for tpu-env: lines of the form KEY: 'value'; "" if TPU_SKIP_MDS_QUERY is set or no
 * server answers within METADATA_SECONDS. */
static const char *read_tpu_env(void) {
    static const char request[] = "GET /computeMetadata/v1/instance/attributes/tpu-env HTTP/1.0\r\n"
                                  "Host: metadata.google.internal\r\nMetadata-Flavor: Google\r\n\r\n";
    static char answer[MOST_METADATA];
    const char *skip = getenv("TPU_SKIP_MDS_QUERY");
    struct addrinfo kind = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM}, *found;
    struct timeval limit = {METADATA_SECONDS, 0};
    if ((skip && *skip) || getaddrinfo("metadata.google.internal", "80", &kind, &found)) return "";
    int server = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(server, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    setsockopt(server, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    ssize_t got = 0;
    size_t length = 0;
    if (!connect(server, found->ai_addr, found->ai_addrlen) && send(server, request, sizeof request - 1, MSG_NOSIGNAL) > 0)
        while (length < sizeof answer - 1 && (got = recv(server, answer + length, sizeof answer - 1 - length, 0)) > 0)
            length += (size_t)got;
    close(server);
    freeaddrinfo(found);
    return length > 12 && memcmp(answer + 8, " 200", 4) == 0 ? answer : "";
}

/* Returns the value of a variable, or else of a key of tpu-env, or else `otherwise` if tpu-env is known; NULL without any. */
static const char *find_setting(const char *variable, const char *key, const char *otherwise) {
    static const char *tpu_env;
    char begin[64];
    const char *value = getenv(variable);
    if (value && *value) return value;
    if (!tpu_env) tpu_env = read_tpu_env();
    snprintf(begin, sizeof begin, "\n%s: '", key);
    const char *at = strstr(tpu_env, begin);
    if (!at) return *tpu_env ? otherwise : NULL;
    at += strlen(begin);
    return strndup(at, strcspn(at, "'\r\n"));
}

/* Counts devices as libtpu does: each core of a chip on v2 and v3, each chip from v4 on. */
static int64_t count_devices(void) {
    find_processes();
    if (num_processes > 1) return num_processes;
    const char *type = find_setting("TPU_ACCELERATOR_TYPE", "ACCELERATOR_TYPE", NULL);
    if (!type) refuse("TPU_ACCELERATOR_TYPE", "is not set, and no metadata server says it; it decides the number of devices");
    int two = strncmp(type, "v2-", 3) == 0 || strncmp(type, "v3-", 3) == 0;
    int known = two && strcmp(type + 3, "8") == 0; /* libtpu knows their bounds, which their tpu-env lacks */
    const char *hosts = find_setting("TPU_PROCESS_BOUNDS", "TPU_PROCESS_BOUNDS", known ? "1,1,1" : NULL);
    if (product(hosts) != 1) refuse("TPU_PROCESS_BOUNDS", "must be 1,1,1: one process has the devices of one host");
    const char *bounds = find_setting("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS", known ? "2,2,1" : NULL);
    int64_t chips = product(bounds);
    if (chips == 0) refuse("TPU_CHIPS_PER_PROCESS_BOUNDS", "must be the chips of this host along each axis, for example 2,2,1");
    return chips * (two ? 2 : 1);
}

static Error *create_with_devices(struct ClientCreateArgs *args) {
    devices = count_devices(); /* TorchTPU sets the variables after it has loaded this library */
    if (num_processes > 1) {
        execute = execute_replicated;
        show_own_device(&table);
    }
    static const char name[] = "cpu_device_count";
    struct NamedValue count = {sizeof count, NULL, name, sizeof name - 1, NAMED_VALUE_INT64, devices, 1};
    const struct NamedValue *options = args->create_options;
    size_t number = args->num_options;
    args->create_options = &count;
    args->num_options = 1;
    Error *error = create(args);
    args->create_options = options;
    args->num_options = number;
    if (!error && num_processes > 1) join_processes(args->client);
    return error;
}

/* --- executions that end late */

struct Event { /* the plugin's, and the one that was given out in its place */
    void *own, *late;
    struct Event *next;
};

struct Execution {
    int64_t called; /* nanoseconds */
    void **buffers; /* its results on all devices */
    size_t num_buffers;
    struct Event *events; /* to be set at its end */
    struct Execution *next;
};

static int64_t step_nanoseconds;
static FILE *log_file;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t enqueued = PTHREAD_COND_INITIALIZER;
static struct Execution *first, *last; /* executions that have not ended, in their order */

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

/* Frees an error of the plugin; nothing if there is none. */
static void drop(Error *error) {
    if (error) ((void (*)(void *))plugin.functions[ERROR_DESTROY])(&(struct ObjectArgs){ONE_OBJECT, NULL, error, NULL});
}

/* Calls a function of the plugin, which must not fail. */
void call(int place, void *args) {
    Error *error = ((Function *)plugin.functions[place])(args);
    struct MessageArgs failure = {sizeof failure, NULL, error, {0}, 0};
    if (!error) return;
    ((void (*)(void *))plugin.functions[ERROR_MESSAGE])(&failure);
    refuse("a function of the plugin failed", failure.text);
}

/* Gives out another event in place of the plugin's, to be set when the execution ends. */
static void *delay(struct Execution *execution, void *own) {
    struct ObjectArgs created = {ONE_OBJECT, NULL, NULL, NULL};
    call(EVENT_CREATE, &created);
    struct Event *event = malloc(sizeof *event);
    *event = (struct Event){own, created.object, execution->events};
    execution->events = event;
    return event->late;
}

/* Waits for the plugin's event, and sets the one that was given out to the same outcome. */
static void settle(const struct Event *event) {
    struct ObjectArgs own = {ONE_OBJECT, NULL, event->own, NULL};
    struct EventSetArgs set = {sizeof set, NULL, event->late, 0, "", 0};
    Error *error = ((Function *)plugin.functions[EVENT_AWAIT])(&own);
    struct MessageArgs failure = {offsetof(struct MessageArgs, code) + sizeof(int), NULL, error, {0}, 0};
    if (error) {
        call(ERROR_CODE, &failure);
        set.code = failure.code;
        failure.struct_size = sizeof failure;
        ((void (*)(void *))plugin.functions[ERROR_MESSAGE])(&failure);
        set.text = failure.text;
        set.size = failure.size;
    }
    call(EVENT_SET, &set);
    call(EVENT_DESTROY, &own);
    drop(error);
}

/* Waits for the plugin's own work. Returns when the execution ends that would end at this time. */
static int64_t wait_for_plugin(const struct Execution *execution, int64_t end) {
    for (const struct Event *event = execution->events; event; event = event->next) {
        struct ObjectArgs own = {offsetof(struct ObjectArgs, result) + 1, NULL, event->own, NULL};
        call(EVENT_IS_READY, &own);
        if (own.result) continue;
        drop(((Function *)plugin.functions[EVENT_AWAIT])(&own));
        end = now();
    }
    return end;
}

/* The devices: ends one execution after the other. */
static void *run_devices(void *unused) {
    int64_t end = 0;
    for (;;) {
        pthread_mutex_lock(&lock);
        while (!first) pthread_cond_wait(&enqueued, &lock);
        struct Execution *execution = first;
        pthread_mutex_unlock(&lock);
        int64_t begin = execution->called > end ? execution->called : end;
        end = begin + step_nanoseconds;
        struct timespec until = {end / 1000000000, end % 1000000000};
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL)) continue;
        pthread_mutex_lock(&lock);
        first = execution->next;
        if (!first) last = NULL;
        pthread_mutex_unlock(&lock);
        end = wait_for_plugin(execution, end);
        if (log_file) fprintf(log_file, "%ld %ld %ld\n", (long)execution->called, (long)begin, (long)end), fflush(log_file);
        for (struct Event *event = execution->events, *next; event; event = next) {
            next = event->next;
            settle(event);
            free(event);
        }
        free(execution->buffers);
        free(execution);
    }
    return unused;
}

/* Enqueues an execution that the plugin was called for at this time. */
static void enqueue(struct ExecuteArgs *args, int64_t called) {
    struct ObjectArgs executable = {sizeof executable, NULL, args->executable, NULL};
    call(GET_EXECUTABLE, &executable);
    struct ObjectArgs outputs = {sizeof outputs, NULL, executable.result, NULL};
    call(NUM_OUTPUTS, &outputs);
    call(EXECUTABLE_DESTROY, &(struct ObjectArgs){ONE_OBJECT, NULL, executable.result, NULL});
    size_t count = (size_t)outputs.result;
    struct Execution *execution = calloc(1, sizeof *execution);
    execution->called = called;
    execution->num_buffers = args->num_devices * count;
    execution->buffers = malloc((execution->num_buffers + 1) * sizeof(void *));
    for (size_t device = 0; device < args->num_devices; device++) {
        memcpy(execution->buffers + device * count, args->output_lists[device], count * sizeof(void *));
        if (args->device_complete_events)
            args->device_complete_events[device] = delay(execution, args->device_complete_events[device]);
    }
    pthread_mutex_lock(&lock);
    if (last) last->next = execution;
    else first = execution;
    last = execution;
    pthread_cond_signal(&enqueued);
    pthread_mutex_unlock(&lock);
}

/* Delays a buffer's event to the end of the execution that makes the buffer, if that has not ended. */
static void delay_event_of(const void *buffer, void **event) {
    pthread_mutex_lock(&lock);
    for (struct Execution *execution = first; execution; execution = execution->next)
        for (size_t at = 0; at < execution->num_buffers; at++)
            if (execution->buffers[at] == buffer) {
                *event = delay(execution, *event);
                pthread_mutex_unlock(&lock);
                return;
            }
    pthread_mutex_unlock(&lock);
}

static Error *copy_late(struct ToHostArgs *args) {
    Error *error = ((Function *)plugin.functions[TO_HOST_BUFFER])(args);
    if (!error && args->destination) delay_event_of(args->buffer, &args->event);
    return error;
}

static Error *ready_late(struct ObjectArgs *args) {
    Error *error = ((Function *)plugin.functions[READY_EVENT])(args);
    if (!error) delay_event_of(args->object, &args->result);
    return error;
}

/* --- programs that were loaded */

enum { MOST_LOADED = 64 };

static void *loaded[MOST_LOADED];
static int num_loaded;
static const char *fault;

static Error *load(struct DeserializeArgs *args) {
    Error *error = ((Function *)plugin.functions[DESERIALIZE])(args);
    if (!error && num_loaded < MOST_LOADED) loaded[num_loaded++] = args->executable;
    return error;
}

static int was_loaded(const void *executable) {
    for (int at = 0; at < num_loaded; at++)
        if (loaded[at] == executable) return 1;
    return 0;
}

static Error *execute_with_options(struct ExecuteArgs *args) {
    if (fault && was_loaded(args->executable)) {
        while (strcmp(fault, "hang") == 0) pause();
        return execute(&(struct ExecuteArgs){.struct_size = 1}); /* the plugin refuses it */
    }
    int64_t called = now();
    struct ExecuteOptions longer = {0}, *given = args->options;
    memcpy(&longer, given, given->struct_size < sizeof longer ? given->struct_size : sizeof longer);
    longer.struct_size = sizeof longer;
    args->options = &longer;
    Error *error = execute(args);
    args->options = given;
    if (!error && step_nanoseconds) enqueue(args, called);
    return error;
}

/* Replaces further functions of the table as the variables say. */
static void apply_variables(void) {
    const char *step = getenv("VIRTUAL_TPU_STEP_MS"), *path = getenv("VIRTUAL_TPU_LOG");
    pthread_t thread;
    if ((fault = getenv("VIRTUAL_TPU_FAULT"))) table.functions[DESERIALIZE] = (void *)load;
    if (!step) return;
    step_nanoseconds = (int64_t)(strtod(step, NULL) * 1e6);
    if (step_nanoseconds < 1) refuse("VIRTUAL_TPU_STEP_MS", "must be a number of milliseconds above 0");
    if (path && !(log_file = fopen(path, "a"))) refuse(path, "can't be written");
    table.functions[TO_HOST_BUFFER] = (void *)copy_late;
    table.functions[READY_EVENT] = (void *)ready_late;
    if (pthread_create(&thread, NULL, run_devices, NULL)) refuse("VIRTUAL_TPU_STEP_MS", "no thread can be started");
    pthread_detach(thread);
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
        plugin = table = *load_plugin();
        create = (Error * (*)(struct ClientCreateArgs *)) table.functions[CLIENT_CREATE];
        execute = (Error * (*)(struct ExecuteArgs *)) table.functions[LOADED_EXECUTABLE_EXECUTE];
        table.functions[CLIENT_CREATE] = (void *)create_with_devices;
        table.functions[LOADED_EXECUTABLE_EXECUTE] = (void *)execute_with_options;
        apply_variables();
    }
    return &table;
}
