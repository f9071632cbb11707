/* Calls of kernels one after the other, without going back between them to whoever wrote them down.

   A call is the address of a function that `call.h` makes, the number of words up to the next call, and the words that it takes. */

#include <stdint.h>

void run(const int64_t *program, int64_t calls) {
    for (; calls; calls--, program += program[1]) ((void (*)(const int64_t *))program[0])(program + 2);
}
