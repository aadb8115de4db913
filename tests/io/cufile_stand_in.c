// What the tests take for NVIDIA's libcufile: it moves host memory, by plain files, and is stricter than the
// real one: it takes whole sectors only, files opened for direct I/O only, no handle that is not registered,
// and an offset in registered memory only. It counts and notes all calls. How it is to behave is said by
// set_mode.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

typedef struct {
  int error, cuda;
} Status;
typedef struct {
  int type;
  union {
    int fd;
    void* pointer;
  } handle;
  const void* operations;
} Descriptor;
typedef struct {
  unsigned major, minor;
  size_t threshold, largest;
  unsigned supported, control, features, rest[64];
} Properties;
typedef struct {
  char op;
  long at, size, in_memory;
  const void* base;
} Call;

enum Mode { WORKS, DRIVER_REFUSES, COMPATIBILITY, PEER_TO_PEER, FILES_REFUSED };
enum { SECTOR = 4096, MAX_CALLS = 4096, MAX_FILES = 1024, MAX_BUFFERS = 64, SHORT = 24 * SECTOR };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static enum Mode mode;
static int files[MAX_FILES], calls_made;
static const void* buffers[MAX_BUFFERS];
static Call calls[MAX_CALLS];

void set_mode(int wanted) {
  mode = wanted;
  calls_made = 0;
}
int registered_buffers(void) {
  int count = 0;
  for (int i = 0; i < MAX_BUFFERS; i++) count += buffers[i] != NULL;
  return count;
}
int registered_files(void) {
  int count = 0;
  for (int i = 0; i < MAX_FILES; i++) count += files[i];
  return count;
}
int call_count(void) {
  return calls_made;
}
Call call_at(int i) {
  return calls[i];
}

Status cuFileDriverOpen(void) {
  return (Status){mode == DRIVER_REFUSES ? 5001 : 0, 0};
}

Status cuFileDriverGetProperties(Properties* found) {
  memset(found, 0, sizeof *found);
  if (mode == PEER_TO_PEER)
    found->features = 1u << 4;
  else if (mode != COMPATIBILITY)
    found->major = 2, found->supported = 1u << 4;
  found->control = 2;  // compatibility mode is allowed, which says nothing
  return (Status){0, 0};
}

Status cuFileHandleRegister(void** handle, Descriptor* wanted) {
  int fd = wanted->handle.fd;
  if (mode == FILES_REFUSED) return (Status){5030, 0};
  if (wanted->type != 1 || fd < 0 || fd >= MAX_FILES || files[fd]) return (Status){5022, 0};
  if (!(fcntl(fd, F_GETFL) & O_DIRECT)) return (Status){5023, 0};
  files[fd] = 1;
  *handle = (void*)(long)(fd + 1);
  return (Status){0, 0};
}

void cuFileHandleDeregister(void* handle) {
  files[(long)handle - 1] = 0;
}

static const void** buffer_at(const void* base) {
  for (int i = 0; i < MAX_BUFFERS; i++)
    if (buffers[i] == base) return &buffers[i];
  return NULL;
}

Status cuFileBufRegister(const void* base, size_t size, int flags) {
  const void** free_place = buffer_at(NULL);
  if (size == 13) return (Status){5033, 1};
  if (buffer_at(base) || !free_place) return (Status){5034, 0};
  *free_place = base;
  return (Status){0, 0};
}

Status cuFileBufDeregister(const void* base) {
  const void** place = buffer_at(base);
  if (!place) return (Status){5035, 0};
  *place = NULL;
  return (Status){0, 0};
}

static int refused(void* handle, char op, const void* base, size_t size, off_t at, off_t in_memory) {
  pthread_mutex_lock(&lock);
  if (calls_made < MAX_CALLS) calls[calls_made++] = (Call){op, at, (long)size, in_memory, base};
  pthread_mutex_unlock(&lock);
  if (!files[(long)handle - 1]) return -5011;
  if (at % SECTOR || size % SECTOR) return -5022;
  if (in_memory && !buffer_at(base)) return -5022;
  if (at == SECTOR * 77) return -5027;
  if (at == SECTOR * 78) {
    errno = EIO;
    return -1;
  }
  return 0;
}

static ssize_t through(int fd, char* memory, size_t size, off_t at, int writing) {
  void* own;  // user memory has any alignment
  size_t some = size > SHORT ? SHORT : size;
  if (posix_memalign(&own, SECTOR, some)) return -5011;
  if (writing) memcpy(own, memory, some);
  ssize_t count = writing ? pwrite(fd, own, some, at) : pread(fd, own, some, at);
  if (!writing && count > 0) memcpy(memory, own, count);
  free(own);
  return count;
}

ssize_t cuFileRead(void* handle, void* base, size_t size, off_t at, off_t in_memory) {
  int error = refused(handle, 'r', base, size, at, in_memory);
  return error ? error : through((int)(long)handle - 1, (char*)base + in_memory, size, at, 0);
}

ssize_t cuFileWrite(void* handle, const void* base, size_t size, off_t at, off_t in_memory) {
  int error = refused(handle, 'w', base, size, at, in_memory);
  return error ? error : through((int)(long)handle - 1, (char*)base + in_memory, size, at, 1);
}
