"""Operations for x86 CPUs with AVX2 or AVX-512, written in C++ and compiled on the machine that runs them; see native_cpu."""
