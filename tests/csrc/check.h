/* check.h - counted expectations. With SW_CHECK_FIRST in the environment the first that fails ends
 * the program. Thread rule: any. */
#ifndef SW_TEST_CHECK_H
#define SW_TEST_CHECK_H

#include <stdbool.h>

#include "base/status.h"

/* Count an expectation and print the sentence if `ok` is false. Return `ok`. */
bool check(bool ok, const char *format, ...) SW_PRINTF(2, 3);

/* Return the name of a status, such as "SW_E_COMM"; "SW_E_?" for an unknown value. */
const char *sw_status_name(sw_status status);

/* Print the counts and return the program's exit status. */
int check_result(void);

#endif
