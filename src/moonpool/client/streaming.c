/* One copy past the caches, for pieces that nobody reads again soon.

   An ordinary store first reads the line that it is about to overwrite, and leaves it in the caches, where it pushes out
   what the interpreters of client and node were using. A streaming store does neither. The C library's memcpy streams
   too, but only from a size that some machines put at hundreds of MB. Built by hatch_build.py, for x86-64 alone. */

#include <emmintrin.h>
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { LINE_BYTES = 64 };

/* Both copy whole lines to a target that begins with one. No prefetching: the processor's own keeps up by itself, and
   was some 8% quicker than prefetches at any distance. */

__attribute__((target("avx2"))) static void copy_lines_avx2(char *target, const char *source, size_t lines)
{
    for (; lines > 0; lines--, target += LINE_BYTES, source += LINE_BYTES) {
        __m256i a = _mm256_loadu_si256((const __m256i *)source);
        __m256i b = _mm256_loadu_si256((const __m256i *)source + 1);
        _mm256_stream_si256((__m256i *)target, a);
        _mm256_stream_si256((__m256i *)target + 1, b);
    }
}

static void copy_lines_sse2(char *target, const char *source, size_t lines)
{
    for (; lines > 0; lines--, target += LINE_BYTES, source += LINE_BYTES) {
        __m128i a = _mm_loadu_si128((const __m128i *)source);
        __m128i b = _mm_loadu_si128((const __m128i *)source + 1);
        __m128i c = _mm_loadu_si128((const __m128i *)source + 2);
        __m128i d = _mm_loadu_si128((const __m128i *)source + 3);
        _mm_stream_si128((__m128i *)target, a);
        _mm_stream_si128((__m128i *)target + 1, b);
        _mm_stream_si128((__m128i *)target + 2, c);
        _mm_stream_si128((__m128i *)target + 3, d);
    }
}

/* The tests build this with SSE2_ONLY as well, to try the other loop on a processor that has both. */
static int has_avx2(void)
{
#ifdef SSE2_ONLY
    return 0;
#else
    return __builtin_cpu_supports("avx2");
#endif
}

/* Copies `bytes` bytes, any number at any alignment. Source and target mustn't overlap. */
__attribute__((visibility("default"))) void moonpool_copy(void *target, const void *source, size_t bytes)
{
    char *to = target;
    const char *from = source;
    size_t head = -(uintptr_t)to % LINE_BYTES;
    if (head > bytes)
        head = bytes;
    memcpy(to, from, head);
    to += head;
    from += head;
    bytes -= head;

    size_t lines = bytes / LINE_BYTES;
    size_t streamed = lines * LINE_BYTES;
    if (has_avx2())
        copy_lines_avx2(to, from, lines);
    else
        copy_lines_sse2(to, from, lines);
    memcpy(to + streamed, from + streamed, bytes - streamed);

    /* Streaming stores may be seen after later ones: without this a commit could overtake the bytes it commits. */
    _mm_sfence();
}
