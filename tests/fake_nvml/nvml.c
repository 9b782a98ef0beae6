/*
 * A library with the functions of NVIDIA's management library that the server calls, for tests on machines without GPUs.
 *
 *     cc -shared -fPIC -o libfake.so nvml.c
 *
 * The simulated devices are described in a text file beside the library, with the library's name and ".devices" appended. The
 * file is read at each call, so that a test can change it while the server runs. Each line is "DEVICE KEY VALUES": the device
 * is a number, "1.0" for the first MIG device of device 1, or "*" for the library itself. A value "!N" makes the call fail with
 * NVML's error N (3 not supported, 4 no permission, 15 GPU is lost, 999 unknown); a missing key makes it return "not
 * supported".
 *
 *     * devices 2                  number of devices
 *     * driver 550.54.15           the driver's version
 *     * init !9                    nvmlInit fails
 *     0 uuid GPU-0                 a device without one does not exist
 *     0 all !15                    all calls for this device fail
 *     0 utilization 37 12          percent of time with kernels, and with memory accesses
 *     0 memory 1000 400            bytes: total, used
 *     0 power 250500               milliwatts
 *     0 power_limit 400000         milliwatts
 *     0 energy 5000                millijoules since the driver was loaded
 *     0 temperature 55             degrees Celsius
 *     0 process 1234 300           process id, bytes; can be repeated
 *     0 children 300               each child of this process, and each of theirs, uses this number of bytes
 *     0 kernels 1234 40 1000       process id, percent of time with kernels, time in microseconds (default now); repeatable
 *     1 mig 7                      in MIG mode, with at most 7 MIG devices
 *     0 bus 00000000:3B:00.0       its PCI bus id
 *     0 cpus 0 1 2 3               its CPU affinity
 *     0 capability 75              its compute capability, multiplied by ten
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7 };

typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char name[32]; } Pci;
typedef struct { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; } Process;
typedef struct { unsigned pid; unsigned long long time; unsigned kernels, memory, encoder, decoder; } Sample;

/* Opens the file of device descriptions. */
static FILE *devices(void) {
    Dl_info info;
    char path[4096];
    if (!dladdr((void *)devices, &info)) return NULL;
    snprintf(path, sizeof path, "%s.devices", info.dli_fname);
    return fopen(path, "r");
}

/* Copies the values of the first line with the device and the key. */
static int line(const char *device, const char *key, char *values, size_t size) {
    char text[512], owner[32], what[32];
    int found = NOT_SUPPORTED, at;
    FILE *file = devices();
    if (!file) return NOT_SUPPORTED;
    while (found != SUCCESS && fgets(text, sizeof text, file)) {
        at = 0;
        text[strcspn(text, "\n")] = 0;
        if (sscanf(text, "%31s %31s %n", owner, what, &at) < 2 || !at) continue;
        if (strcmp(owner, device) || strcmp(what, key)) continue;
        snprintf(values, size, "%s", text + at);
        found = SUCCESS;
    }
    fclose(file);
    return found == SUCCESS && values[0] == '!' ? atoi(values + 1) : found;
}

/* A handle is a number: device * 256 + MIG device + 1; a MIG device of 0 is the device itself. */
static void name_of(void *handle, char *name, size_t size) {
    size_t number = (size_t)handle - 1;
    if (number % 256) snprintf(name, size, "%zu.%zu", number / 256, number % 256 - 1);
    else snprintf(name, size, "%zu", number / 256);
}

static void *handle_of(size_t device, size_t mig) { return (void *)(device * 256 + mig + 1); }

/* Copies the values of a device, unless all its calls fail. */
static int text_of(void *handle, const char *key, char *values, size_t size) {
    char name[32], all[64];
    name_of(handle, name, sizeof name);
    int code = line(name, "all", all, sizeof all);
    if (code != SUCCESS && code != NOT_SUPPORTED) return code;
    return line(name, key, values, size);
}

static int number_of(void *handle, const char *key, unsigned long long *first, unsigned long long *second) {
    char values[256];
    int code = text_of(handle, key, values, sizeof values);
    if (code != SUCCESS) return code;
    int count = sscanf(values, "%llu %llu", first, second ? second : first);
    return count >= (second ? 2 : 1) ? SUCCESS : INVALID;
}

static int unsigned_of(void *handle, const char *key, unsigned *value) {
    unsigned long long number;
    int code = number_of(handle, key, &number, NULL);
    if (code == SUCCESS) *value = (unsigned)number;
    return code;
}

int nvmlInit_v2(void) {
    char values[64];
    int code = line("*", "init", values, sizeof values);
    return code == NOT_SUPPORTED ? SUCCESS : code;
}

int nvmlShutdown(void) { return SUCCESS; }

int nvmlSystemGetDriverVersion(char *version, unsigned length) { return line("*", "driver", version, length); }

int nvmlDeviceGetCount_v2(unsigned *count) {
    char values[64];
    int code = line("*", "devices", values, sizeof values);
    if (code == SUCCESS) *count = (unsigned)atoi(values);
    return code;
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) { return text_of(device, "uuid", uuid, length); }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    char uuid[128];
    *device = handle_of(index, 0);
    return text_of(*device, "uuid", uuid, sizeof uuid);
}

int nvmlDeviceGetUtilizationRates(void *device, Utilization *rates) {
    unsigned long long gpu, memory;
    int code = number_of(device, "utilization", &gpu, &memory);
    if (code == SUCCESS) *rates = (Utilization){(unsigned)gpu, (unsigned)memory};
    return code;
}

int nvmlDeviceGetMemoryInfo_v2(void *device, Memory *memory) {
    unsigned long long total, used;
    if (memory->version != (sizeof *memory | 2u << 24)) return INVALID;
    int code = number_of(device, "memory", &total, &used);
    if (code == SUCCESS) memory->total = total, memory->used = used, memory->reserved = 0, memory->free = total - used;
    return code;
}

int nvmlDeviceGetPowerUsage(void *device, unsigned *power) { return unsigned_of(device, "power", power); }

int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned *limit) { return unsigned_of(device, "power_limit", limit); }

int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *energy) {
    return number_of(device, "energy", energy, NULL);
}

int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *temperature) {
    return sensor ? INVALID : unsigned_of(device, "temperature", temperature);
}

int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) {
    unsigned most;
    int code = unsigned_of(device, "mig", &most);
    if (code == SUCCESS) *current = *pending = 1;
    return code;
}

int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count) { return unsigned_of(device, "mig", count); }

int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **mig) {
    char uuid[128];
    *mig = handle_of(((size_t)device - 1) / 256, index + 1);
    return text_of(*mig, "uuid", uuid, sizeof uuid) == SUCCESS ? SUCCESS : NOT_FOUND;
}

int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    unsigned tenfold;
    int code = unsigned_of(device, "capability", &tenfold);
    if (code == SUCCESS) *major = tenfold / 10, *minor = tenfold % 10;
    return code;
}

int nvmlDeviceGetPciInfo_v3(void *device, Pci *pci) {
    char values[64];
    int code = text_of(device, "bus", values, sizeof values);
    if (code == SUCCESS) snprintf(pci->name, sizeof pci->name, "%.31s", values);
    return code;
}

int nvmlDeviceGetCpuAffinity(void *device, unsigned size, unsigned long *words) {
    char values[512], *rest = values, *end;
    int code = text_of(device, "cpus", values, sizeof values);
    for (unsigned word = 0; code == SUCCESS && word < size; word++) words[word] = 0;
    while (code == SUCCESS) {
        unsigned long cpu = strtoul(rest, &end, 10);
        if (end == rest) break;
        if (cpu / 64 < size) words[cpu / 64] |= 1ul << cpu % 64;
        rest = end;
    }
    return code;
}

/* Adds a process if there is room, and counts it in any case. */
static void add(Process *processes, unsigned room, unsigned *count, Process process) {
    if (*count < room && processes) processes[*count] = process;
    *count += 1;
}

/* Adds the children of a process, and theirs; /proc lists them by the thread that started them. */
static void add_children(const char *parent, Process *processes, unsigned room, unsigned *count, unsigned long long bytes) {
    char path[512], child[16];
    snprintf(path, sizeof path, "/proc/%s/task", parent);
    DIR *folder = opendir(path);
    struct dirent *entry;
    while (folder && (entry = readdir(folder))) {
        unsigned pid;
        snprintf(path, sizeof path, "/proc/%s/task/%s/children", parent, entry->d_name);
        FILE *file = entry->d_name[0] == '.' ? NULL : fopen(path, "r");
        while (file && fscanf(file, "%u", &pid) == 1) {
            add(processes, room, count, (Process){pid, bytes, -1u, -1u});
            snprintf(child, sizeof child, "%u", pid);
            add_children(child, processes, room, count, bytes);
        }
        if (file) fclose(file);
    }
    if (folder) closedir(folder);
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, Process *processes) {
    char name[32], text[512], owner[32], what[32], values[64];
    unsigned long long first, second;
    unsigned room = *count;
    int code = text_of(device, "process", values, sizeof values);
    if (code != SUCCESS && code != NOT_SUPPORTED) return code;
    name_of(device, name, sizeof name);
    *count = 0;
    FILE *file = devices();
    while (file && fgets(text, sizeof text, file)) {
        int numbers = sscanf(text, "%31s %31s %llu %llu", owner, what, &first, &second);
        if (numbers < 3 || strcmp(owner, name)) continue;
        if (!strcmp(what, "process") && numbers == 4)
            add(processes, room, count, (Process){(unsigned)first, second, -1u, -1u});
        if (!strcmp(what, "children")) add_children("self", processes, room, count, first);
    }
    if (file) fclose(file);
    return *count > room ? TOO_SMALL : SUCCESS;
}

/* Returns the samples after `last`. Like the driver, returns NOT_FOUND if no sample is newer, and TOO_SMALL without room. */
int nvmlDeviceGetProcessUtilization(void *device, Sample *samples, unsigned *count, unsigned long long last) {
    char name[32], text[512], owner[32], what[32], values[64];
    unsigned pid, percent, room = *count;
    struct timespec now;
    int code = text_of(device, "kernels", values, sizeof values);
    if (code != SUCCESS) return code;
    name_of(device, name, sizeof name);
    clock_gettime(CLOCK_REALTIME, &now);
    *count = 0;
    FILE *file = devices();
    while (file && fgets(text, sizeof text, file)) {
        unsigned long long time = now.tv_sec * 1000000ull + now.tv_nsec / 1000;
        int numbers = sscanf(text, "%31s %31s %u %u %llu", owner, what, &pid, &percent, &time);
        if (numbers < 4 || strcmp(owner, name) || strcmp(what, "kernels") || time <= last) continue;
        if (samples && *count < room) samples[*count] = (Sample){pid, time, percent, 0, 0, 0};
        *count += 1;
    }
    if (file) fclose(file);
    if (*count == 0) return NOT_FOUND;
    return samples && *count <= room ? SUCCESS : TOO_SMALL;
}
