/* Calls of the file system that fail when a test says so. Loaded by LD_PRELOAD; see failing_calls.py.

   LLMTRAIN_FAIL has five fields with colons between them: the kind of call, an errno, the number of
   calls that succeed first, the number of calls that then fail, and a text. Only calls of this kind
   whose path contains the text are counted. With LLMTRAIN_CALLS, the kind and path of each call
   whose path contains that text are appended to the file that LLMTRAIN_CALLS_LOG names. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static int calls_so_far;

static void append_to_log(const char *kind, const char *path)
{
    const char *text = getenv("LLMTRAIN_CALLS");
    const char *log = getenv("LLMTRAIN_CALLS_LOG");
    if (text == NULL || log == NULL || strstr(path, text) == NULL)
        return;

    char line[PATH_MAX + 32];
    int length = snprintf(line, sizeof line, "%s %s\n", kind, path);
    int file = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT, 0600);
    syscall(SYS_write, file, line, length);
    syscall(SYS_close, file);
}

/* Return 1, with errno set, if this call is one that must fail. */
static int must_fail(const char *kind, const char *path)
{
    int errno_before = errno;
    append_to_log(kind, path);
    errno = errno_before;

    char failing_kind[16];
    char text[PATH_MAX];
    int number, first, count;
    const char *wish = getenv("LLMTRAIN_FAIL");
    if (wish == NULL)
        return 0;
    if (sscanf(wish, "%15[^:]:%d:%d:%d:%4095[^\n]", failing_kind, &number, &first, &count, text) != 5)
        return 0;
    if (strcmp(kind, failing_kind) != 0 || strstr(path, text) == NULL)
        return 0;

    int call = __atomic_fetch_add(&calls_so_far, 1, __ATOMIC_SEQ_CST);
    if (call < first || call >= first + count)
        return 0;
    errno = number;
    return 1;
}

/* Write the path of an open file into a buffer. */
static const char *path_of(int descriptor, char *buffer)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    int errno_before = errno;
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, buffer, PATH_MAX - 1);
    errno = errno_before;
    buffer[length > 0 ? length : 0] = '\0';
    return buffer;
}

/* Write the path of a name in an open folder into a buffer. */
static const char *path_in(int folder, const char *name, char *buffer)
{
    if (folder == AT_FDCWD || name[0] == '/')
        return name;
    path_of(folder, buffer);
    size_t length = strlen(buffer);
    snprintf(buffer + length, PATH_MAX - length, "/%s", name);
    return buffer;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define MODE(flags, mode)                              \
    mode_t mode = 0;                                   \
    if ((flags) & (O_CREAT | O_TMPFILE)) {             \
        va_list arguments;                             \
        va_start(arguments, flags);                    \
        mode = va_arg(arguments, mode_t);              \
        va_end(arguments);                             \
    }

#define OPEN(name)                                              \
    int name(const char *path, int flags, ...)                  \
    {                                                           \
        MODE(flags, mode)                                       \
        if (must_fail("open", path))                            \
            return -1;                                          \
        return NEXT(name)(path, flags, mode);                   \
    }

#define OPENAT(name)                                            \
    int name(int folder, const char *path, int flags, ...)      \
    {                                                           \
        char buffer[PATH_MAX];                                  \
        MODE(flags, mode)                                       \
        if (must_fail("open", path_in(folder, path, buffer)))   \
            return -1;                                          \
        return NEXT(name)(folder, path, flags, mode);           \
    }

/* A call on an open file. */
#define ON_FILE(kind, result, name, descriptor, parameters, ...) \
    result name parameters                                       \
    {                                                            \
        char buffer[PATH_MAX];                                   \
        if (must_fail(kind, path_of(descriptor, buffer)))        \
            return (result)-1;                                   \
        return NEXT(name)(__VA_ARGS__);                          \
    }

/* A call on a name in a folder, which AT_FDCWD can be. */
#define ON_NAME(kind, name, folder, path, parameters, ...)       \
    int name parameters                                          \
    {                                                            \
        char buffer[PATH_MAX];                                   \
        if (must_fail(kind, path_in(folder, path, buffer)))      \
            return -1;                                           \
        return NEXT(name)(__VA_ARGS__);                          \
    }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

ON_FILE("read", ssize_t, read, f, (int f, void *b, size_t n), f, b, n)
ON_FILE("read", ssize_t, pread, f, (int f, void *b, size_t n, off_t o), f, b, n, o)
ON_FILE("read", ssize_t, pread64, f, (int f, void *b, size_t n, off64_t o), f, b, n, o)

ON_FILE("write", ssize_t, write, f, (int f, const void *b, size_t n), f, b, n)
ON_FILE("write", ssize_t, pwrite, f, (int f, const void *b, size_t n, off_t o), f, b, n, o)
ON_FILE("write", ssize_t, pwrite64, f, (int f, const void *b, size_t n, off64_t o), f, b, n, o)
ON_FILE("write", ssize_t, writev, f, (int f, const struct iovec *v, int n), f, v, n)
ON_FILE("write", ssize_t, sendfile, f, (int f, int i, off_t *o, size_t n), f, i, o, n)
ON_FILE("write", ssize_t, sendfile64, f, (int f, int i, off64_t *o, size_t n), f, i, o, n)
ON_FILE("write", ssize_t, copy_file_range, f,
        (int i, off64_t *p, int f, off64_t *q, size_t n, unsigned m), i, p, f, q, n, m)

ON_FILE("fsync", int, fsync, f, (int f), f)
ON_FILE("fsync", int, fdatasync, f, (int f), f)
ON_FILE("flock", int, flock, f, (int f, int operation), f, operation)

/* The name that a file gets is the one that counts. */
ON_NAME("rename", rename, AT_FDCWD, b, (const char *a, const char *b), a, b)
ON_NAME("rename", renameat, g, b, (int f, const char *a, int g, const char *b), f, a, g, b)
ON_NAME("mkdir", mkdir, AT_FDCWD, p, (const char *p, mode_t m), p, m)
ON_NAME("mkdir", mkdirat, f, p, (int f, const char *p, mode_t m), f, p, m)
ON_NAME("unlink", unlink, AT_FDCWD, p, (const char *p), p)
ON_NAME("unlink", unlinkat, f, p, (int f, const char *p, int flags), f, p, flags)
ON_NAME("unlink", rmdir, AT_FDCWD, p, (const char *p), p)

/* A file that is mapped is read, too. */
#define MMAP(name, offset_type)                                                          \
    void *name(void *a, size_t n, int protection, int flags, int f, offset_type o)       \
    {                                                                                    \
        char buffer[PATH_MAX];                                                           \
        if (f >= 0 && must_fail("read", path_of(f, buffer)))                             \
            return MAP_FAILED;                                                           \
        return NEXT(name)(a, n, protection, flags, f, o);                                \
    }
MMAP(mmap, off_t)
MMAP(mmap64, off64_t)
