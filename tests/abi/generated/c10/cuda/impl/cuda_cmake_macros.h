/* cuda_cmake_macros.h - stands for the one header of c10/cuda that torch's build generates, where torch was built without CUDA:
 * its wheel ships the others. Found behind torch's own folders. */
#pragma once
#define C10_CUDA_BUILD_SHARED_LIBS
