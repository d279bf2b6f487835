/* end_isa.h - what follows is compiled for every processor again. */
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
