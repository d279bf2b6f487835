/* glibc_compat.h - binds to old symbol versions, so that one wheel loads from glibc 2.28 on.
 *
 * Idea: glibc 2.34 moved libpthread and libdl into libc and gave their functions a new version. An
 * object linked there asks for GLIBC_2.34, although the old entry is still present with the same
 * code. Naming the old version lowers the requirement to 2.28. A flag in setup.py includes this
 * file into every C file (not in sanitizer builds, which intercept by name), so no file does. It
 * has what the engine calls. A newer symbol fails tests/test_wheel.py: add it here, or call the
 * kernel by syscall().
 *
 * Thread rule: any; there is no state.
 */
#pragma once

#include <features.h>

#if defined(__GLIBC__) && (defined(__x86_64__) || defined(__aarch64__))

/* SW_BIND: the function's version on x86_64; on aarch64 all have GLIBC_2.17. */
#if defined(__x86_64__)
#define SW_GLIBC_FIRST "GLIBC_2.2.5"
#define SW_BIND(name, version) __asm__(".symver " #name "," #name "@" version);
#else
#define SW_GLIBC_FIRST "GLIBC_2.17"
#define SW_BIND(name, version) __asm__(".symver " #name "," #name "@GLIBC_2.17");
#endif
#define SW_BIND_FIRST(name) SW_BIND(name, SW_GLIBC_FIRST)

#if __GLIBC_PREREQ(2, 29)
SW_BIND_FIRST(pow)
#endif

#if __GLIBC_PREREQ(2, 32)
SW_BIND_FIRST(pthread_sigmask)
#endif

#if __GLIBC_PREREQ(2, 33)
/* Before 2.33 the stat family was inline over __xstat and its like, which are still exported. */
#include <sys/stat.h>
#if defined(__x86_64__)
#define SW_STAT_VERSION 1
#else
#define SW_STAT_VERSION 0
#endif
int __xstat(int version, const char *path, struct stat *out);
int __lxstat(int version, const char *path, struct stat *out);
int __fxstat(int version, int fd, struct stat *out);
SW_BIND_FIRST(__xstat)
SW_BIND_FIRST(__lxstat)
SW_BIND_FIRST(__fxstat)
#define stat(path, out) __xstat(SW_STAT_VERSION, path, out)
#define lstat(path, out) __lxstat(SW_STAT_VERSION, path, out)
#define fstat(fd, out) __fxstat(SW_STAT_VERSION, fd, out)
#endif

#if __GLIBC_PREREQ(2, 34)
SW_BIND_FIRST(dlclose)
SW_BIND_FIRST(dlerror)
SW_BIND_FIRST(dlopen)
SW_BIND_FIRST(dlsym)
SW_BIND(pthread_condattr_setclock, "GLIBC_2.3.3")
SW_BIND_FIRST(pthread_create)
SW_BIND_FIRST(pthread_join)
SW_BIND_FIRST(pthread_mutex_trylock)
SW_BIND_FIRST(pthread_once)
#endif

#if __GLIBC_PREREQ(2, 38)
/* _GNU_SOURCE redirects these to C23 forms, which also accept "0b1"; bind the older ones. */
#define SW_BIND_OLD_SCAN(c23, name) __asm__(".symver " #c23 "," #name "@" SW_GLIBC_FIRST);
SW_BIND_OLD_SCAN(__isoc23_strtol, strtol)
SW_BIND_OLD_SCAN(__isoc23_strtoll, strtoll)
SW_BIND_OLD_SCAN(__isoc23_strtoull, strtoull)
#endif

#endif
