/* faults.h - allocations that fail in turn.
 *
 * The C tests are linked with --wrap for malloc, calloc, realloc, mmap and munmap, so every call of
 * the engine comes by here. A thread is a rank: each arms its own count, and the allocations of the
 * others go on.
 *
 * Thread rule: any; the counts of allocations belong to the calling thread, that of mappings to the
 * process.
 */
#ifndef SW_TEST_FAULTS_H
#define SW_TEST_FAULTS_H

/* Lets the `nth` allocation from here on fail, once (1: the next one; 0: none), and counts from 0
 * again. */
void faults_arm(long nth);
/* Allocations of this thread since faults_arm. */
long faults_count(void);
/* Pages that the engine has mapped and not given back (the address sanitizer looks after the rest).
 */
long faults_mapped(void);

#endif
