/* glibc_compat.h - binds to old symbol versions, so that one wheel loads from glibc 2.28 on.
 *
 * Idea: glibc 2.34 moved libpthread and libdl into libc and gave their functions a new version. An
 * object linked there asks for GLIBC_2.34, although the old entry is still present with the same
 * code. Naming the old version lowers the requirement to 2.28. A flag in setup.py includes this
 * file into every C file (not in sanitizer builds, which intercept by name), so no file does. A
 * newer symbol fails tests/test_wheel.py: add it here, or call the kernel by syscall().
 *
 * Thread rule: any; there is no state.
 */
#ifndef SW_PLATFORM_GLIBC_COMPAT_H
#define SW_PLATFORM_GLIBC_COMPAT_H

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
SW_BIND_FIRST(exp)
SW_BIND_FIRST(exp2)
SW_BIND_FIRST(log)
SW_BIND_FIRST(log2)
SW_BIND_FIRST(pow)
#endif

#if __GLIBC_PREREQ(2, 32)
SW_BIND_FIRST(pthread_sigmask)
SW_BIND_FIRST(pthread_getattr_np)
SW_BIND(pthread_getaffinity_np, "GLIBC_2.3.4")
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
int __fxstatat(int version, int fd, const char *path, struct stat *out, int flags);
SW_BIND_FIRST(__xstat)
SW_BIND_FIRST(__lxstat)
SW_BIND_FIRST(__fxstat)
SW_BIND(__fxstatat, "GLIBC_2.4")
#define stat(path, out) __xstat(SW_STAT_VERSION, path, out)
#define lstat(path, out) __lxstat(SW_STAT_VERSION, path, out)
#define fstat(fd, out) __fxstat(SW_STAT_VERSION, fd, out)
#define fstatat(fd, path, out, flags) __fxstatat(SW_STAT_VERSION, fd, path, out, flags)
#endif

#if __GLIBC_PREREQ(2, 34)
SW_BIND_FIRST(dladdr)
SW_BIND_FIRST(dlclose)
SW_BIND_FIRST(dlerror)
SW_BIND_FIRST(dlopen)
SW_BIND_FIRST(dlsym)
SW_BIND_FIRST(pthread_attr_getstacksize)
SW_BIND_FIRST(pthread_attr_setstacksize)
SW_BIND_FIRST(pthread_barrier_destroy)
SW_BIND_FIRST(pthread_barrier_init)
SW_BIND_FIRST(pthread_barrier_wait)
SW_BIND(pthread_condattr_setclock, "GLIBC_2.3.3")
SW_BIND_FIRST(pthread_condattr_setpshared)
SW_BIND_FIRST(pthread_create)
SW_BIND_FIRST(pthread_detach)
SW_BIND(pthread_getname_np, "GLIBC_2.12")
SW_BIND_FIRST(pthread_getspecific)
SW_BIND_FIRST(pthread_join)
SW_BIND_FIRST(pthread_key_create)
SW_BIND_FIRST(pthread_key_delete)
SW_BIND_FIRST(pthread_kill)
SW_BIND(pthread_mutex_consistent, "GLIBC_2.12")
SW_BIND_FIRST(pthread_mutex_timedlock)
SW_BIND_FIRST(pthread_mutex_trylock)
SW_BIND_FIRST(pthread_mutexattr_destroy)
SW_BIND_FIRST(pthread_mutexattr_init)
SW_BIND_FIRST(pthread_mutexattr_setpshared)
SW_BIND(pthread_mutexattr_setrobust, "GLIBC_2.12")
SW_BIND_FIRST(pthread_mutexattr_settype)
SW_BIND_FIRST(pthread_once)
SW_BIND_FIRST(pthread_rwlock_destroy)
SW_BIND_FIRST(pthread_rwlock_init)
SW_BIND_FIRST(pthread_rwlock_rdlock)
SW_BIND_FIRST(pthread_rwlock_unlock)
SW_BIND_FIRST(pthread_rwlock_wrlock)
SW_BIND(pthread_setaffinity_np, "GLIBC_2.3.4")
SW_BIND(pthread_setname_np, "GLIBC_2.12")
SW_BIND_FIRST(pthread_setspecific)
SW_BIND_FIRST(sem_destroy)
SW_BIND_FIRST(sem_init)
SW_BIND_FIRST(sem_post)
SW_BIND_FIRST(sem_timedwait)
SW_BIND_FIRST(sem_trywait)
SW_BIND_FIRST(sem_wait)
#endif

#if __GLIBC_PREREQ(2, 35)
SW_BIND_FIRST(hypot)
#endif

#if __GLIBC_PREREQ(2, 38)
SW_BIND_FIRST(fmod)
SW_BIND_FIRST(fmodf)
/* _GNU_SOURCE redirects these to C23 forms, which also accept "0b1"; bind the older ones. */
#define SW_BIND_OLD_SCAN(c23, name) __asm__(".symver " #c23 "," #name "@" SW_GLIBC_FIRST);
SW_BIND_OLD_SCAN(__isoc23_strtol, strtol)
SW_BIND_OLD_SCAN(__isoc23_strtoll, strtoll)
SW_BIND_OLD_SCAN(__isoc23_strtoul, strtoul)
SW_BIND_OLD_SCAN(__isoc23_strtoull, strtoull)
#endif

#endif
#endif
