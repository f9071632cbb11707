/* How a program calls a kernel (`program.c`): with a word for each argument, an integer, a pointer or the bits of a float. */

#include <stdint.h>
#include <string.h>

#define I(number) words[number]
#define P(number) ((void *)words[number])
#define F(number) real(words[number])
#define CALL(kernel, ...) void call_##kernel(const int64_t *words) { kernel(__VA_ARGS__); }

static inline float real(int64_t bits) { float x; memcpy(&x, &bits, sizeof x); return x; }
