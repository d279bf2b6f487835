/* faults.h - allocations that fail in turn.
 *
 * The C tests are linked with --wrap for malloc, calloc, realloc, mmap and munmap, so every call of
 * the engine passes here. A thread is a rank: each arms its own count, and the allocations of other
 * threads succeed.
 *
 * Thread rule: any; the counts of allocations belong to the calling thread, that of mappings to the
 * process.
 */
#ifndef SW_TEST_FAULTS_H
#define SW_TEST_FAULTS_H

/* Let the `nth` allocation from here on fail once (1: the next one; 0: none), and restart the
 * count.
 */
void faults_arm(long nth);
/* Return the allocations of this thread since faults_arm. */
long faults_count(void);
/* Return the pages that the engine has mapped and not unmapped. The address sanitizer checks the
 * heap. */
long faults_mapped(void);

#endif
