/* Fills memory from a function with a name, says so, and uses it until it is killed. Built with frame pointers. */
#include <stdio.h>
#include <stdlib.h>

enum { SIZE = 32 << 20, PAGE = 4096 };

__attribute__((noinline)) void fill_pages(volatile char *memory)
{
    for (long at = 0; at < SIZE; at += PAGE)
        memory[at] = 1;
}

__attribute__((noinline)) long use_pages(volatile char *memory)
{
    long sum = 0;
    for (long at = 0; at < SIZE; at += PAGE)
        sum += memory[at];
    return sum;
}

__attribute__((noinline)) void outer_caller(volatile char *memory)
{
    fill_pages(memory);
    /* No tail call: this function is to be on the stack. */
    __asm__ volatile("" ::: "memory");
}

int main(void)
{
    volatile char *memory = malloc(SIZE);
    if (!memory)
        return 1;
    outer_caller(memory);
    puts("filled");
    fflush(stdout);
    while (use_pages(memory))
        ;
    return 0;
}
