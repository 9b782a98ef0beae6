/*
 * A library with the functions of the CUDA driver that workers call, for tests on machines without GPUs.
 *
 *     cc -shared -fPIC -o libcuda.so cuda.c
 *
 * Its two devices have no real memory. Memory shared by another process is a file in the folder named by
 * PHAROS_FAKE_CUDA; its handle is the file's name, and its address is that of the mapped file, so that a test can read
 * "the device's memory" there. Each open, close, read, write and copy appends a line to the file "log" in the folder.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef int Result;
typedef unsigned long long Address;
typedef struct {
  char name[64];
} Handle;

enum { FINE = 0, NOT_INITIALIZED = 3, INVALID = 1, NOT_SUPPORTED = 801, ILLEGAL_ADDRESS = 700, DEVICES = 2, MOST = 64 };

static int initialized, retained[DEVICES];
static struct {
  char *start;
  size_t size;
  Handle handle;
} mapped[MOST];

static void tell(const char *what, const char *name) {
  char path[4096], line[256];
  snprintf(path, sizeof path, "%s/log", getenv("PHAROS_FAKE_CUDA"));
  int length = snprintf(line, sizeof line, "%s %s\n", what, name), file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0644);
  if (file >= 0 && write(file, line, length) == length) close(file);
}

static int at(Address address, size_t size) {
  for (int i = 0; i < MOST; i++) {
    Address start = (Address)mapped[i].start;
    if (start && start <= address && address + size <= start + mapped[i].size) return i;
  }
  return -1;
}

Result cuInit(unsigned flags) {
  initialized = 1;
  return flags ? INVALID : FINE;
}
Result cuGetErrorString(Result result, const char **text) {
  *text = result == ILLEGAL_ADDRESS ? "an illegal memory access was encountered" : "invalid argument";
  return FINE;
}
Result cuDeviceGetCount(int *count) {
  *count = DEVICES;
  return FINE;
}
Result cuDeviceGet(int *device, int number) {
  if (!initialized) return NOT_INITIALIZED;
  *device = number;
  return number < 0 || number >= DEVICES ? INVALID : FINE;
}
Result cuDeviceGetName(char *name, int length, int device) {
  snprintf(name, length, "simulated %d", device);
  return FINE;
}
Result cuDevicePrimaryCtxRetain(void **context, int device) {
  retained[device] = 1;
  *context = &retained[device];
  return FINE;
}
Result cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  *flags = 0;
  *active = retained[device];
  return FINE;
}
Result cuCtxSetCurrent(void *context) { return context ? FINE : INVALID; }
Result cuCtxSynchronize(void) { return FINE; }
Result cuMemHostRegister_v2(void *start, size_t size, unsigned flags) { return start && size && flags ? FINE : INVALID; }
Result cuMemHostUnregister(void *start) { return start ? FINE : INVALID; }

Result cuIpcOpenMemHandle_v2(Address *address, Handle handle, unsigned flags) {
  char path[4096];
  struct stat status;
  int place = 0, file;
  (void)flags;
  snprintf(path, sizeof path, "%s/%.63s", getenv("PHAROS_FAKE_CUDA"), handle.name);
  while (place < MOST && mapped[place].start) place++;
  if (place == MOST || !handle.name[0] || (file = open(path, O_RDWR)) < 0) return INVALID;
  fstat(file, &status);
  mapped[place].start = mmap(NULL, status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  mapped[place].size = status.st_size;
  mapped[place].handle = handle;
  close(file);
  *address = (Address)mapped[place].start;
  tell("open", handle.name);
  return FINE;
}
Result cuIpcCloseMemHandle(Address address) {
  int place = at(address, 0);
  if (place < 0) return INVALID;
  tell("close", mapped[place].handle.name);
  munmap(mapped[place].start, mapped[place].size);
  mapped[place].start = NULL;
  return FINE;
}
Result cuMemGetAddressRange_v2(Address *start, size_t *size, Address address) {
  int place = at(address, 0);
  if (place < 0) return INVALID;
  *start = (Address)mapped[place].start;
  *size = mapped[place].size;
  return FINE;
}
Result cuMemcpyDtoH_v2(void *to, Address from, size_t size) {
  int place = at(from, size);
  if (place < 0) return ILLEGAL_ADDRESS;
  tell("read", mapped[place].handle.name);
  memcpy(to, (char *)from, size);
  return FINE;
}
Result cuMemcpyHtoD_v2(Address to, const void *from, size_t size) {
  int place = at(to, size);
  if (place < 0) return ILLEGAL_ADDRESS;
  tell("write", mapped[place].handle.name);
  memcpy((char *)to, from, size);
  return FINE;
}

/* Both ends may be memory of the process itself, which a model uses as "device memory". */
static Result copy(Address to, Address from, size_t size) {
  int place = at(to, size), source = at(from, size);
  if (to < from + size && from < to + size) return ILLEGAL_ADDRESS;  // The result of the real driver is undefined.
  if (source >= 0) tell("copy_from", mapped[source].handle.name);
  if (place >= 0) tell("copy_to", mapped[place].handle.name);
  memmove((char *)to, (char *)from, size);
  return FINE;
}
Result cuMemcpyDtoDAsync_v2(Address to, Address from, size_t size, void *stream) {
  return stream ? INVALID : copy(to, from, size);
}
Result cuMemcpyPeerAsync(Address to, void *there, Address from, void *here, size_t size, void *stream) {
  return stream || there == here ? INVALID : copy(to, from, size);
}
Result cuStreamSynchronize(void *stream) {
  if (stream) return INVALID;
  tell("wait", "default stream");
  return FINE;
}

/* Functions that must exist but are not called by models in Python. */
#define ABSENT(name) \
  Result name(void) { return NOT_SUPPORTED; }
ABSENT(cuMemAlloc_v2)
ABSENT(cuMemFree_v2)
ABSENT(cuMemcpyHtoDAsync_v2)
ABSENT(cuMemcpyDtoHAsync_v2)
ABSENT(cuMemsetD8Async)
ABSENT(cuStreamCreate)
ABSENT(cuStreamDestroy_v2)
ABSENT(cuStreamWaitEvent)
ABSENT(cuEventCreate)
ABSENT(cuEventDestroy_v2)
ABSENT(cuEventRecord)
ABSENT(cuEventSynchronize)
ABSENT(cuEventElapsedTime)
ABSENT(cuModuleLoadData)
ABSENT(cuModuleGetFunction)
ABSENT(cuLaunchKernel)
