// Included first in libraries of a wheel (files.py): symbols of glibc 2.28 and of GCC 8's libstdc++ for newer ones, where a newer
// compiler would choose those of its own system. `make wheel` fails if one is missing here.
#pragma once

#include <cstdlib>
#include <vector>

// The versions of glibc 2.29 do not set errno through a wrapper; results are equal.
__asm__(".symver log,log@GLIBC_2.2.5");
__asm__(".symver exp2,exp2@GLIBC_2.2.5");
// GCC 12 gave wait() a version of its own when it became noexcept.
__asm__(".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE,"
        "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");

namespace std {
// GCC 11 added this function, which containers call when a size overflows.
__attribute__((weak)) void __throw_bad_array_new_length() { std::abort(); }
}  // namespace std
