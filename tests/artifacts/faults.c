/* Makes the n-th system call that touches a folder fail: preloaded into a Python process, told what by ctypes.
 *
 * Counted are calls that change the disk, and opens and closes, of paths below the folder and of descriptors
 * opened there. fault_arm(folder, n, what): n = 0 only counts. `what` is an errno or one of the two below; of
 * short writes, only writes are counted.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum { KILL = -1, SHORT_WRITE = -2, DESCRIPTORS = 4096 };

static char folder[4096];
static size_t folder_length;
static int target, fault, count, hits;
static char watched[DESCRIPTORS];

void fault_arm(const char *path, int n, int what) {
    strncpy(folder, path, sizeof folder - 1);
    folder_length = strlen(folder);
    target = n;
    fault = what;
    count = hits = 0;
}

int fault_count(void) { return count; }
int fault_hits(void) { return hits; }

static int below(const char *path) {
    return folder_length && path && strncmp(path, folder, folder_length) == 0;
}

static int is_watched(int descriptor) {
    return folder_length && descriptor >= 0 && descriptor < DESCRIPTORS && watched[descriptor];
}

/* Whether this call is the one; an errno is set then, and a kill does not return. */
static int is_hit(int counted) {
    if (!counted || fault == SHORT_WRITE || ++count != target) return 0;
    hits++;
    if (fault == KILL) kill(getpid(), SIGKILL);
    errno = fault;
    return 1;
}

#define NEXT(result, name, ...)                                     \
    static result (*next)(__VA_ARGS__);                             \
    if (!next) next = (result (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

static int opened(int descriptor, const char *path) {
    if (descriptor >= 0 && descriptor < DESCRIPTORS) watched[descriptor] = below(path);
    return descriptor;
}

#define OPEN(name)                                                  \
    int name(const char *path, int flags, ...) {                    \
        NEXT(int, #name, const char *, int, ...);                   \
        va_list rest;                                               \
        va_start(rest, flags);                                      \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest);                                               \
        if (is_hit(below(path))) return -1;                         \
        return opened(next(path, flags, mode), path);               \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                \
    int name(int at, const char *path, int flags, ...) {            \
        NEXT(int, #name, int, const char *, int, ...);              \
        va_list rest;                                               \
        va_start(rest, flags);                                      \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest);                                               \
        if (is_hit(below(path))) return -1;                         \
        return opened(next(at, path, flags, mode), path);           \
    }
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int descriptor, const void *data, size_t size) {
    NEXT(ssize_t, "write", int, const void *, size_t);
    if (is_hit(is_watched(descriptor))) return -1;
    if (fault == SHORT_WRITE && is_watched(descriptor) && ++count == target) {
        hits++;
        size = (size + 1) / 2;
    }
    return next(descriptor, data, size);
}

/* Linux closes the descriptor whatever it answers. */
int close(int descriptor) {
    NEXT(int, "close", int);
    int hit = is_hit(is_watched(descriptor)), number = errno;
    if (descriptor >= 0 && descriptor < DESCRIPTORS) watched[descriptor] = 0;
    int answer = next(descriptor);
    if (hit) errno = number;
    return hit ? -1 : answer;
}

#define OF_DESCRIPTOR(name, parameters, arguments, ...)             \
    int name parameters {                                           \
        NEXT(int, #name, __VA_ARGS__);                              \
        return is_hit(is_watched(descriptor)) ? -1 : next arguments; \
    }
OF_DESCRIPTOR(fsync, (int descriptor), (descriptor), int)
OF_DESCRIPTOR(fdatasync, (int descriptor), (descriptor), int)
OF_DESCRIPTOR(fchmod, (int descriptor, mode_t mode), (descriptor, mode), int, mode_t)
OF_DESCRIPTOR(ftruncate, (int descriptor, off_t size), (descriptor, size), int, off_t)
OF_DESCRIPTOR(ftruncate64, (int descriptor, off64_t size), (descriptor, size), int, off64_t)

/* These answer with the errno itself. */
#define RESERVE(name, offset_type)                                  \
    int name(int descriptor, offset_type offset, offset_type size) { \
        NEXT(int, #name, int, offset_type, offset_type);            \
        return is_hit(is_watched(descriptor)) ? errno : next(descriptor, offset, size); \
    }
RESERVE(posix_fallocate, off_t)
RESERVE(posix_fallocate64, off64_t)

#define OF_PATH(name, parameters, arguments, ...)                   \
    int name parameters {                                           \
        NEXT(int, #name, __VA_ARGS__);                              \
        return is_hit(below(path)) ? -1 : next arguments;           \
    }
OF_PATH(mkdir, (const char *path, mode_t mode), (path, mode), const char *, mode_t)
OF_PATH(unlink, (const char *path), (path), const char *)
OF_PATH(rmdir, (const char *path), (path), const char *)
OF_PATH(link, (const char *from, const char *path), (from, path), const char *, const char *)
OF_PATH(rename, (const char *from, const char *path), (from, path), const char *, const char *)
OF_PATH(linkat, (int from_at, const char *from, int at, const char *path, int flags),
        (from_at, from, at, path, flags), int, const char *, int, const char *, int)
OF_PATH(renameat, (int from_at, const char *from, int at, const char *path),
        (from_at, from, at, path), int, const char *, int, const char *)
OF_PATH(mkdirat, (int at, const char *path, mode_t mode), (at, path, mode), int, const char *, mode_t)
OF_PATH(unlinkat, (int at, const char *path, int flags), (at, path, flags), int, const char *, int)
