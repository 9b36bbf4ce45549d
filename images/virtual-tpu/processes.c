/* Several processes with one device each, on one host or on several, as TorchTPU and torch_xla.launch start them: one a chip.
 *
 * The CPU plugin knows no other process. So every process opens the devices of all, and shows its own as the only addressable one. A
 * program of one device runs there. A program of all devices runs by replicated execution: the processes exchange its arguments
 * over TCP, each runs the whole program with the arguments of all, and keeps the results of its own device. If the program has no
 * collective, its results depend on no other process, and nothing is exchanged.
 *
 * The processes find each other as libtpu's do: TPU_PROCESS_ADDRESSES lists host:port of all, CLOUD_TPU_TASK_ID is this one's place
 * there. A process that loses another waits forever, as a chip does in a collective; whatever started them must end it.
 */
#define _GNU_SOURCE
#include "pjrt.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MOST_PROCESSES = 64, CONNECT_SECONDS = 300, MOST_PROGRAMS = 4096 };

struct Header { /* begins what a process sends for an execution */
    uint64_t number, num_args, bytes;
};

struct Copy { /* an argument on the host */
    int type;
    int64_t *dimensions;
    size_t num_dimensions, size;
    char *data;
};

struct ProgramInfo { /* of a loaded executable */
    void *executable;
    size_t num_devices, num_outputs;
    int collective;
};

int num_processes = 1;
static int own_process;
static char *addresses[MOST_PROCESSES];
static int peers[MOST_PROCESSES]; /* connections */
static void *client, *devices[MOST_PROCESSES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct ProgramInfo programs[MOST_PROGRAMS];
static uint64_t exchanges;

/* Reads TPU_PROCESS_ADDRESSES and CLOUD_TPU_TASK_ID. Without them, or with one address, there is one process. */
void find_processes(void) {
    const char *list = getenv("TPU_PROCESS_ADDRESSES"), *task = getenv("CLOUD_TPU_TASK_ID");
    if (!list || !strchr(list, ',')) return;
    num_processes = 0;
    char *rest = strdup(list);
    for (char *each; (each = strsep(&rest, ","));) {
        if (num_processes == MOST_PROCESSES) refuse("TPU_PROCESS_ADDRESSES", "has more than 64 addresses");
        if (!strchr(each, ':')) refuse("TPU_PROCESS_ADDRESSES", "must list host:port of every process");
        addresses[num_processes++] = each;
    }
    own_process = task ? atoi(task) : -1;
    if (own_process < 0 || own_process >= num_processes)
        refuse("CLOUD_TPU_TASK_ID", "must be this process's place in TPU_PROCESS_ADDRESSES");
}

/* --- connections */

static int open_socket(const char *address, int (*use)(int, const struct sockaddr *, socklen_t)) {
    struct addrinfo kind = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM}, *found;
    char host[256];
    const char *port = strrchr(address, ':') + 1;
    snprintf(host, sizeof host, "%.*s", (int)(port - 1 - address), address);
    if (getaddrinfo(host, port, &kind, &found)) return -1;
    int made = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    setsockopt(made, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    setsockopt(made, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    int failed = use(made, found->ai_addr, found->ai_addrlen);
    freeaddrinfo(found);
    if (!failed) return made;
    close(made);
    return -1;
}

/* Connects to the processes before this one, and accepts those after it. */
static void connect_peers(void) {
    int listening = open_socket(addresses[own_process], bind), from, on = 1;
    if (listening < 0 || listen(listening, MOST_PROCESSES)) refuse(addresses[own_process], "can't be listened on");
    time_t deadline = time(NULL) + CONNECT_SECONDS;
    for (int peer = 0; peer < own_process; peer++) {
        while ((peers[peer] = open_socket(addresses[peer], connect)) < 0) {
            if (time(NULL) > deadline) refuse(addresses[peer], "this process of the slice does not answer");
            usleep(50000);
        }
        if (send(peers[peer], &own_process, sizeof own_process, MSG_NOSIGNAL) != sizeof own_process)
            refuse(addresses[peer], "closed the connection");
    }
    for (int missing = num_processes - own_process - 1; missing > 0; missing--) {
        struct pollfd waiting = {listening, POLLIN, 0};
        if (poll(&waiting, 1, CONNECT_SECONDS * 1000) <= 0) refuse(addresses[own_process], "a process of the slice is missing");
        int made = accept4(listening, NULL, NULL, SOCK_CLOEXEC);
        setsockopt(made, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        if (recv(made, &from, sizeof from, MSG_WAITALL) != sizeof from || from <= own_process || from >= num_processes)
            refuse(addresses[own_process], "another program connected");
        peers[from] = made;
    }
    close(listening);
}

static void wait_forever(int peer) {
    fprintf(stderr, "virtual TPU: process %d lost process %d (%s), and waits in the collective as a chip would\n", own_process, peer,
            addresses[peer]);
    for (;;) pause();
}

/* Returns the bytes that a call on a connection moved; 0 if it would block. Does not return when the peer is gone. */
static size_t moved(ssize_t bytes, int peer) {
    if (bytes > 0) return (size_t)bytes;
    if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    wait_forever(peer);
    return 0;
}

/* Sends a message to all peers and receives one of the same length from each, at received[peer]. */
static void exchange_bytes(const char *message, size_t length, char **received) {
    size_t sent[MOST_PROCESSES] = {0}, got[MOST_PROCESSES] = {0};
    for (;;) {
        struct pollfd waiting[MOST_PROCESSES];
        int pending = 0;
        for (int peer = 0; peer < num_processes; peer++) {
            int events = peer == own_process ? 0 : (sent[peer] < length ? POLLOUT : 0) | (got[peer] < length ? POLLIN : 0);
            waiting[peer] = (struct pollfd){events ? peers[peer] : -1, (short)events, 0};
            pending += events != 0;
        }
        if (!pending) return;
        poll(waiting, (nfds_t)num_processes, -1);
        for (int peer = 0; peer < num_processes; peer++) {
            short ready = waiting[peer].revents;
            if (ready & POLLOUT)
                sent[peer] += moved(send(peers[peer], message + sent[peer], length - sent[peer], MSG_NOSIGNAL | MSG_DONTWAIT), peer);
            if ((ready & (POLLIN | POLLHUP | POLLERR)) && got[peer] < length)
                got[peer] += moved(recv(peers[peer], received[peer] + got[peer], length - got[peer], MSG_DONTWAIT), peer);
            else if (ready & (POLLHUP | POLLERR))
                wait_forever(peer);
        }
    }
}

/* --- the table as one process sees it */

static Error *process_index(struct ValueArgs *args) {
    args->number = own_process;
    return NULL;
}

static Error *addressable_devices(struct ListArgs *args) {
    args->list = &devices[own_process];
    args->length = 1;
    return NULL;
}

static Error *lookup_addressable_device(struct LookupArgs *args) {
    args->device = devices[own_process];
    return NULL;
}

static Error *is_addressable(struct ValueArgs *args) {
    args->flag = args->object == devices[own_process];
    return NULL;
}

static Error *local_hardware_id(struct ValueArgs *args) {
    args->number = args->object == devices[own_process] ? 0 : -1;
    return NULL;
}

static Error *description_process_index(struct ObjectArgs *args) { /* the plugin numbers its devices from 0, as processes */
    return ((Function *)plugin.functions[DESCRIPTION_ID])(args);
}

static Error *copy_to_own_device(struct FromHostArgs *args) {
    if (!args->device && !args->memory) args->device = devices[own_process];
    return ((Function *)plugin.functions[FROM_HOST_BUFFER])(args);
}

static Error *executable_devices(struct ListArgs *args) {
    Error *error = ((Function *)plugin.functions[EXECUTABLE_ADDRESSABLE_DEVICES])(args);
    return error || args->length == 1 ? error : addressable_devices(args);
}

static Error *destroy_executable(struct ObjectArgs *args) {
    pthread_mutex_lock(&lock);
    for (struct ProgramInfo *each = programs; each < programs + MOST_PROGRAMS; each++)
        if (each->executable == args->object) each->executable = NULL;
    pthread_mutex_unlock(&lock);
    return ((Function *)plugin.functions[LOADED_EXECUTABLE_DESTROY])(args);
}

void show_own_device(struct Api *table) {
    table->functions[PROCESS_INDEX] = (void *)process_index;
    table->functions[ADDRESSABLE_DEVICES] = (void *)addressable_devices;
    table->functions[LOOKUP_ADDRESSABLE_DEVICE] = (void *)lookup_addressable_device;
    table->functions[IS_ADDRESSABLE] = (void *)is_addressable;
    table->functions[LOCAL_HARDWARE_ID] = (void *)local_hardware_id;
    table->functions[DESCRIPTION_PROCESS_INDEX] = (void *)description_process_index;
    table->functions[FROM_HOST_BUFFER] = (void *)copy_to_own_device;
    table->functions[EXECUTABLE_ADDRESSABLE_DEVICES] = (void *)executable_devices;
    table->functions[LOADED_EXECUTABLE_DESTROY] = (void *)destroy_executable;
}

/* Connects the processes after the plugin's client was made. */
void join_processes(void *made) {
    struct ListArgs all = {sizeof all, NULL, client = made, NULL, 0};
    call(DEVICES, &all);
    memcpy(devices, all.list, (size_t)num_processes * sizeof *devices);
    connect_peers();
}

/* --- replicated execution */

static size_t ask_number(int place, void *executable) {
    struct ObjectArgs args = {sizeof args, NULL, executable, NULL};
    call(place, &args);
    return (size_t)args.result;
}

/* Returns whether a compiled program has a collective. Names of operations are text in the serialized program. */
static int has_collective(void *executable) {
    static const char *const names[] = {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-"};
    struct Program program = {sizeof program, NULL, NULL, 0, NULL, 0};
    struct ObjectArgs args = {sizeof args, NULL, executable, &program};
    call(OPTIMIZED_PROGRAM, &args); /* the size */
    program.code = malloc(program.code_size);
    call(OPTIMIZED_PROGRAM, &args);
    int found = 0;
    for (size_t at = 0; at < sizeof names / sizeof *names; at++)
        found |= memmem(program.code, program.code_size, names[at], strlen(names[at])) != NULL;
    free(program.code);
    return found;
}

static const struct ProgramInfo *describe(void *executable) {
    struct ProgramInfo *free_place = NULL;
    for (struct ProgramInfo *each = programs; each < programs + MOST_PROGRAMS; each++) {
        if (each->executable == executable) return each;
        if (!each->executable && !free_place) free_place = each;
    }
    if (!free_place) refuse("programs", "more than 4,096 are loaded at once");
    void *own = (void *)ask_number(GET_EXECUTABLE, executable);
    size_t number = ask_number(NUM_REPLICAS, own) * ask_number(NUM_PARTITIONS, own);
    *free_place = (struct ProgramInfo){executable, number, ask_number(NUM_OUTPUTS, own), number > 1 && has_collective(own)};
    call(EXECUTABLE_DESTROY, &(struct ObjectArgs){ONE_OBJECT, NULL, own, NULL});
    return free_place;
}

static void await(void *event) {
    if (!event) return;
    call(EVENT_AWAIT, &(struct ObjectArgs){ONE_OBJECT, NULL, event, NULL});
    call(EVENT_DESTROY, &(struct ObjectArgs){ONE_OBJECT, NULL, event, NULL});
}

static void copy_to_host(void *buffer, struct Copy *copy) {
    struct ListArgs dimensions = {sizeof dimensions, NULL, buffer, NULL, 0};
    struct ToHostArgs args = {sizeof args, NULL, buffer, NULL, NULL, 0, NULL};
    call(BUFFER_DIMENSIONS, &dimensions);
    copy->dimensions = dimensions.list;
    copy->num_dimensions = dimensions.length;
    copy->type = (int)ask_number(BUFFER_TYPE, buffer);
    call(TO_HOST_BUFFER, &args); /* the size */
    copy->size = args.size;
    args.destination = copy->data;
    if (!copy->data) return;
    call(TO_HOST_BUFFER, &args);
    await(args.event);
}

static void *copy_to_device(const struct Copy *copy, const char *data, void *device) {
    struct FromHostArgs args = {.struct_size = sizeof args, .client = client, .data = data, .type = copy->type,
                                .dimensions = copy->dimensions, .num_dimensions = copy->num_dimensions, .device = device};
    call(FROM_HOST_BUFFER, &args);
    await(args.done_event);
    return args.buffer;
}

/* Copies the arguments to one message behind a header; `copies` say what is where. Returns the length. */
static size_t pack(void *const *arguments, size_t number, struct Copy *copies, char **message) {
    size_t length = sizeof(struct Header);
    for (size_t at = 0; at < number; at++) {
        copies[at] = (struct Copy){0};
        copy_to_host(arguments[at], &copies[at]);
        length += copies[at].size;
    }
    char *end = (*message = malloc(length)) + sizeof(struct Header);
    for (size_t at = 0; at < number; end += copies[at++].size) {
        copies[at].data = end;
        if (copies[at].size) copy_to_host(arguments[at], &copies[at]);
    }
    *(struct Header *)*message = (struct Header){exchanges, number, length - sizeof(struct Header)};
    return length;
}

/* Exchanges the messages of all processes. Refuses peers that run another program. */
static void exchange(char **messages, size_t length) {
    char why[200], *headers[MOST_PROCESSES];
    struct Header theirs[MOST_PROCESSES], *own = (struct Header *)messages[own_process];
    for (int peer = 0; peer < num_processes; peer++) headers[peer] = (char *)&theirs[peer];
    own->number = ++exchanges;
    exchange_bytes(messages[own_process], sizeof *own, headers);
    for (int peer = 0; peer < num_processes; peer++) {
        if (peer == own_process) continue;
        if (memcmp(&theirs[peer], own, sizeof *own)) {
            snprintf(why, sizeof why, "process %d brings %lu arguments of %lu bytes to collective %lu, and process %d %lu of %lu",
                     peer, (long)theirs[peer].num_args, (long)theirs[peer].bytes, (long)own->number, own_process,
                     (long)own->num_args, (long)own->bytes);
            refuse("the processes run different programs", why);
        }
        messages[peer] = malloc(length);
        headers[peer] = messages[peer] + sizeof *own;
    }
    exchange_bytes(messages[own_process] + sizeof *own, length - sizeof *own, headers);
}

/* Runs a program of all devices with these arguments; returns the plugin's error. `args` gets the results of the own device. */
static Error *execute_on_all(struct ExecuteArgs *args, void **const *lists, size_t num_outputs) {
    void **outputs[MOST_PROCESSES], *events[MOST_PROCESSES] = {0};
    struct ExecuteArgs all = *args;
    for (int device = 0; device < num_processes; device++)
        outputs[device] = device == own_process ? (void **)args->output_lists[0] : calloc(num_outputs + 1, sizeof(void *));
    all.argument_lists = lists;
    all.output_lists = outputs;
    all.device_complete_events = events;
    all.num_devices = (size_t)num_processes;
    all.execute_device = NULL;
    Error *error = ((Function *)plugin.functions[LOADED_EXECUTABLE_EXECUTE])(&all);
    for (int device = 0; device < num_processes; device++) {
        if (device == own_process) continue;
        if (!error) await(events[device]);
        for (size_t at = 0; !error && at < num_outputs; at++)
            call(BUFFER_DESTROY, &(struct ObjectArgs){ONE_OBJECT, NULL, outputs[device][at], NULL});
        free(outputs[device]);
    }
    if (error) return error;
    if (args->device_complete_events) args->device_complete_events[0] = events[own_process];
    else await(events[own_process]);
    return NULL;
}

Error *execute_replicated(struct ExecuteArgs *args) {
    pthread_mutex_lock(&lock);
    struct ProgramInfo info = *describe(args->executable);
    if (info.num_devices == 1) {
        pthread_mutex_unlock(&lock); /* programs of one device may run at the same time */
        return ((Function *)plugin.functions[LOADED_EXECUTABLE_EXECUTE])(args);
    }
    size_t number = args->num_args;
    struct Copy *copies = calloc(number + 1, sizeof *copies);
    char *messages[MOST_PROCESSES] = {0};
    size_t length = pack(args->argument_lists[0], number, copies, &messages[own_process]);
    if (info.collective) exchange(messages, length);
    void **lists[MOST_PROCESSES];
    for (int device = 0; device < num_processes; device++) {
        if (device == own_process) {
            lists[device] = (void **)args->argument_lists[0];
            continue;
        }
        const char *data = (messages[device] ? messages[device] : messages[own_process]) + sizeof(struct Header);
        lists[device] = calloc(number + 1, sizeof(void *));
        for (size_t at = 0; at < number; data += copies[at++].size)
            lists[device][at] = copy_to_device(&copies[at], data, devices[device]);
    }
    Error *error = execute_on_all(args, (void **const *)lists, info.num_outputs);
    for (int device = 0; device < num_processes; device++) {
        free(messages[device]);
        if (device == own_process) continue;
        for (size_t at = 0; at < number; at++)
            call(BUFFER_DESTROY, &(struct ObjectArgs){ONE_OBJECT, NULL, lists[device][at], NULL});
        free(lists[device]);
    }
    free(copies);
    pthread_mutex_unlock(&lock);
    return error;
}
