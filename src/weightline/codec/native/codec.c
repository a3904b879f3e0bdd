/* The codec's inner loops in C: the same bits as weightline/codec/kernels.py, faster. Optional; built at first use.
 *
 * The file includes itself once for each element width (W bytes, type U). Inputs are checked by the caller, but what comes from a file
 * is not trusted: every read of coded bits is bounded, every position is checked. Formats are specified in docs/codec.md.
 */
#ifndef W

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__LZCNT__) || defined(__AVX2__) || defined(__AVX512BW__)
#include <immintrin.h>
#endif

typedef uint64_t u64;
typedef int64_t i64;
typedef uint32_t u32;

#define A0 0xD2B4130F5F20D123ull
#define B0 0x96582715A92284FDull
#define S0 0xE7413F2FF84F515Dull
#define C0 0x8C2DC07002823359ull
#define A1 0x6F20BBE878FD5F13ull
#define B1 0x4312407410415125ull
#define S1 0x1E30DD2C1FD0F03Bull
#define C1 0x97106B247A5F892Dull

/* Limits and modes of the coded format. */
#define CAP 24            /* a quotient of CAP in a value run means: the value follows in full */
#define MAXK 24           /* largest Rice parameter of a gap run */
#define ONES 0            /* every step is one unit */
#define RICE 1
#define EXCEPTIONS 2      /* runs of one-unit steps between others */
#define PLAIN 3           /* new bits as they are */
#define MAXCLASSES 256
#define SPAN 255          /* changes between two looks at counters of a byte each */
#define PAD 64            /* what a vector store may write beyond the end of a run of gaps */
#define AHEAD 512         /* changes whose memory is asked for ahead, block by block */
#define NEAR 128          /* the same, one by one */
#define ASK(p) __builtin_prefetch((p), 0, 2) /* into L2: L1 has buffers for so few lines on their way that a loop waits for them */
#define TRIED 8           /* Rice parameters that the choice of dense classes looks at */
#define OVERHEAD (28 << 8) /* what a class costs in the tables, in 1/256 bit */
#define LATER (14 << 8)    /* the same, where there are many classes, whose columns are alike */
#define MANY 128          /* changes of a dense chunk that has many; where more than one in 256 changes, fewer classes are faster and cost little */
enum { E_NONE, E_FAST, E_DENSE, E_RAW };
enum { R_OLD, R_NEW, R_COUNT, R_START, R_OFFSET, R_HITS, R_FIELDS };            /* rows of a scan */
enum { T_ENCODING, T_K, T_CLASSES, T_NBYTES, T_FIELDS };                         /* one a chunk */
enum { K_LO, K_HI, K_N, K_K, K_MODE, K_R, K_X, K_FIELDS };                       /* one a class */

static inline u64 mix0(u64 i, u64 b) { u64 x = i * A0 + S0 + b * B0; x = (x ^ (x >> 32)) * C0; return x ^ (x >> 32); }
static inline u64 mix1(u64 i, u64 b) { u64 x = i * A1 + S1 + b * B1; x = (x ^ (x >> 32)) * C1; return x ^ (x >> 32); }
#ifdef __LZCNT__
static inline int bitlen(u64 x) { return 64 - (int)_lzcnt_u64(x); } /* most steps are 0 less one: a branch here is missed often */
#else
static inline int bitlen(u64 x) { return x ? 64 - __builtin_clzll(x) : 0; }
#endif

/* log2(x) in 1/256, x >= 1: exponent and a linear fraction. Integers only, so that every backend decides alike. */
static inline i64 lg(u64 x) { int h = bitlen(x) - 1; u64 f = h >= 8 ? x >> (h - 8) : x << (8 - h); return (i64)h * 256 + (i64)(f & 255); }

static inline i64 gap_cost(u64 n, u64 total) { if (total < n) total = n; return (i64)n * (lg(total) - lg(n)) + (i64)n * 369; }
/* n steps, of which `ones` are one unit and the others are `bits` bits long in all */
static inline i64 value_cost(u64 n, u64 ones, u64 bits) {
    u64 others = n - ones; i64 c = 0;
    if (others && ones) c = (i64)n * lg(n) - (i64)ones * lg(ones) - (i64)others * lg(others);
    return c + (i64)(bits + others) * 256;
}

static inline void put(u64 *out, i64 at, u64 value, int bits) {
    if (!bits) return;
    i64 w = at >> 6; int s = at & 63;
    out[w] |= value << s;
    if (s + bits > 64) out[w + 1] |= value >> (64 - s);
}
static inline u64 get(const u64 *in, i64 at, int bits) {
    if (!bits) return 0;
    i64 w = at >> 6; int s = at & 63;
    u64 v = in[w] >> s;
    if (s + bits > 64) v |= in[w + 1] << (64 - s);
    return bits == 64 ? v : v & ((1ull << bits) - 1);
}
/* The same for up to 56 bits, without a branch: `in` is little-endian and padded. */
static inline u64 peek(const u64 *in, i64 at, u64 mask) {
    u64 v;
    memcpy(&v, (const char *)in + (at >> 3), 8);
    return v >> (at & 7) & mask;
}

/* ---- runs of gaps: all quotients in unary, then all remainders ---- */
static i64 gap_bits(const u32 *g, i64 n, int k) { i64 q = 0; for (i64 i = 0; i < n; i++) q += g[i] >> k; return q + n * (k + 1); }
static int gap_k(const u32 *g, i64 n, i64 *bits) {
    u64 sum = 0; for (i64 i = 0; i < n; i++) sum += g[i];
    int mid = bitlen(n ? sum / n : 0); mid = mid ? mid - 1 : 0;
    int best = 0; i64 least = -1;
    for (int k = mid ? mid - 1 : 0; k <= mid + 1 && k <= MAXK; k++) { i64 b = gap_bits(g, n, k); if (least < 0 || b < least) { least = b; best = k; } }
    *bits = least < 0 ? 0 : least;
    return best;
}
static i64 put_gaps(u64 *out, i64 at, const u32 *g, i64 n, int k) {
    i64 w = at >> 6;
    u64 now = out[w], low = (1ull << k) - 1; /* the word that is being filled: those after it are zero */
    for (i64 i = 0; i < n; i++) {
        at += g[i] >> k;
        if (at >> 6 != w) { out[w] = now; w = at >> 6; now = 0; }
        now |= 1ull << (at & 63);
        at++;
    }
    if (at >> 6 != w) { out[w] = now; w = at >> 6; now = 0; }
    if (k) {
        int s = at & 63;
        for (i64 i = 0; i < n; i++) {
            u64 v = g[i] & low;
            now |= v << s;
            s += k;
            if (s >= 64) { out[w++] = now; s -= 64; now = v >> (k - s); }
        }
    }
    out[w] = now;
    return at + n * k;
}
/* Places of the next n set bits, less `at`: the ends of n numbers in unary. `b` has room for PAD more. Returns 0, or -1 when the bits end
 * first. */
static int find_ones(const u64 *in, i64 at, i64 bits, i64 n, u32 *b) {
    i64 words = (bits + 63) >> 6, w = at >> 6, i = 0;
    u64 now = in[w] & (~0ull << (at & 63));
#ifdef __AVX512VBMI2__
    static const uint8_t places[64] __attribute__((aligned(64))) = {
        0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
        32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};
    __m512i iota = _mm512_load_si512(places);
    for (;;) {
        int set = __builtin_popcountll(now);
        __m512i p = _mm512_maskz_compress_epi8(now, iota), base = _mm512_set1_epi32((int)((w << 6) - at));
        u32 *o = b + i;
        _mm512_storeu_si512(o, _mm512_add_epi32(base, _mm512_cvtepu8_epi32(_mm512_castsi512_si128(p))));
        _mm512_storeu_si512(o + 16, _mm512_add_epi32(base, _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(p, 1))));
        if (set > 32) {
            _mm512_storeu_si512(o + 32, _mm512_add_epi32(base, _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(p, 2))));
            _mm512_storeu_si512(o + 48, _mm512_add_epi32(base, _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(p, 3))));
        }
        i += set;
        if (i >= n) return 0;
        if (++w >= words) return -1;
        now = in[w];
    }
#else
    for (; i < n; i++) {
        while (!now) { if (++w >= words) return -1; now = in[w]; }
        b[i] = (u32)((w << 6) + __builtin_ctzll(now) - at);
        now &= now - 1;
    }
    return 0;
#endif
}
/* The quotients of a run, shifted; `g` has room for PAD more. Returns the bit after them, or -1: the bits end before the run does, or a gap
 * is no number of 31 bits. */
static i64 get_quotients(const u64 *in, i64 at, i64 bits, u32 *g, i64 n, int k) {
    if (at + n > bits || k < 0 || k > MAXK || bits >> 31 || find_ones(in, at, bits, n, g)) return -1;
    at += (i64)g[n - 1] + 1;
    u32 before = (u32)-1, large = 0;
    for (i64 i = 0; i < n; i++) { u32 b = g[i], q = b - before - 1; before = b; large |= q; g[i] = q << k; }
    return large >> (31 - k) || at + n * k > bits ? -1 : at;
}
/* Returns the bit after the run, or -1. */
static i64 get_gaps(const u64 *in, i64 at, i64 bits, u32 *g, i64 n, int k) {
    if (!n) return at;
    if ((at = get_quotients(in, at, bits, g, n, k)) < 0) return -1;
    u64 mask = (1ull << k) - 1;
    if (k) for (i64 i = 0; i < n; i++) g[i] |= (u32)peek(in, at + i * k, mask);
    return at + n * k;
}
/* The same, as positions below `total`; `g` is scratch. */
static i64 get_positions(const u64 *in, i64 bits, u32 *g, u32 *pos, i64 n, int k, i64 total) {
    i64 at = get_quotients(in, 0, bits, g, n, k), p = -1;
    if (at < 0) return -1;
    u64 mask = (1ull << k) - 1;
    for (i64 i = 0; i < n; i++) { p += (i64)(g[i] | (u32)peek(in, at + i * k, mask)) + 1; pos[i] = (u32)p; }
    return p < total ? at + n * k : -1;
}

/* A run of n single bits, given one a byte (0 or 1). */
static i64 put_signs(u64 *out, i64 at, const uint8_t *sign, i64 n) {
    i64 i = 0;
    for (; i + 8 <= n; i += 8) {
        u64 v;
        memcpy(&v, sign + i, 8);
        put(out, at + i, (v * 0x0102040810204080ull) >> 56, 8); /* bytes of 0 or 1 to bits, first byte lowest */
    }
    for (; i < n; i++) out[(at + i) >> 6] |= (u64)sign[i] << ((at + i) & 63);
    return at + n;
}
/* A run of n single bits, one a byte. `in` is padded, and so is what lies behind `sign`. */
static void get_signs(const u64 *in, i64 at, uint8_t *sign, i64 n) {
    for (i64 i = 0; i < n; i += 64) {
        i64 w = (at + i) >> 6; int s = (at + i) & 63;
        u64 v = in[w] >> s;
        if (s && i + 64 - s < n) v |= in[w + 1] << (64 - s);
#ifdef __AVX512BW__
        if (i + 64 <= n) { _mm512_storeu_si512(sign + i, _mm512_maskz_set1_epi8(v, 1)); continue; }
#endif
        i64 end = n - i < 64 ? n - i : 64;
        for (i64 k = 0; k < end; k++) sign[i + k] = (uint8_t)(v >> k & 1);
    }
}

#define CAT_(a, b) a##_##b
#define CAT(a, b) CAT_(a, b)
#define FN(name) CAT(name, W)

#define W 1
#define U uint8_t
#include __FILE__
#undef W
#undef U
#define W 2
#define U uint16_t
#include __FILE__
#undef W
#undef U
#define W 4
#define U uint32_t
#include __FILE__
#undef W
#undef U
#define W 8
#define U uint64_t
#include __FILE__
#undef W
#undef U

int wl_abi(void) { return 4; }

#else /* ------------------------------------------------------------------ once for each width */

#define BITS (8 * W)
#define SIGN ((U)((U)1 << (BITS - 1)))

static inline U FN(order)(U u, int is_float) { return is_float ? (U)(u ^ (U)((U)(0 - (U)(u >> (BITS - 1))) | SIGN)) : u; }
static inline U FN(disorder)(U v, int is_float) { return is_float ? (U)(v ^ (U)((U)((U)(v >> (BITS - 1)) - 1) | SIGN)) : v; }
static inline int FN(expo)(U u, int shift, int mask) { return (int)((u64)u >> shift) & mask; }

void FN(wl_digest_range)(const U *bits, i64 n, u64 start, u64 *out) {
    u64 s0 = 0, s1 = 0;
    for (i64 j = 0; j < n; j++) { s0 += mix0(start + (u64)j, bits[j]); s1 += mix1(start + (u64)j, bits[j]); }
    out[0] += s0; out[1] += s1;
}

void FN(wl_digest_at)(const i64 *index, u64 base, const U *bits, i64 n, u64 *out) {
    u64 s0 = 0, s1 = 0;
    for (i64 j = 0; j < n; j++) { s0 += mix0(base + (u64)index[j], bits[j]); s1 += mix1(base + (u64)index[j], bits[j]); }
    out[0] += s0; out[1] += s1;
}

/* What the digest gains when elements go from old to new. */
void FN(wl_digest_moves)(u64 start, const u32 *pos, const U *old, const U *neu, i64 n, u64 *out) {
    u64 s0 = 0, s1 = 0;
    for (i64 j = 0; j < n; j++) {
        u64 i = start + pos[j];
        s0 += mix0(i, neu[j]) - mix0(i, old[j]);
        s1 += mix1(i, neu[j]) - mix1(i, old[j]);
    }
    out[0] += s0; out[1] += s1;
}

void FN(wl_gather)(const U *source, const i64 *index, i64 n, U *out) {
    for (i64 j = 0; j < n; j++) { ASK(source + index[j + NEAR < n ? j + NEAR : n - 1]); out[j] = source[index[j]]; }
}
void FN(wl_scatter)(U *target, const i64 *index, const U *values, i64 n) {
    for (i64 j = 0; j < n; j++) { ASK(target + index[j + NEAR < n ? j + NEAR : n - 1]); target[index[j]] = values[j]; }
}

/* Bit j is set where a[j] != b[j], for 64 elements. */
static inline u64 FN(differ64)(const U *a, const U *b) {
#if W == 1 && defined(__AVX512BW__)
    return _mm512_cmpneq_epu8_mask(_mm512_loadu_si512(a), _mm512_loadu_si512(b));
#elif W == 2 && defined(__AVX512BW__)
    u64 lo = _mm512_cmpneq_epu16_mask(_mm512_loadu_si512(a), _mm512_loadu_si512(b));
    u64 hi = _mm512_cmpneq_epu16_mask(_mm512_loadu_si512(a + 32), _mm512_loadu_si512(b + 32));
    return lo | hi << 32;
#elif W == 4 && defined(__AVX512F__)
    u64 m = 0;
    for (int i = 0; i < 4; i++) m |= (u64)_mm512_cmpneq_epu32_mask(_mm512_loadu_si512(a + 16 * i), _mm512_loadu_si512(b + 16 * i)) << (16 * i);
    return m;
#elif W == 2 && defined(__AVX2__)
    u64 m = 0;
    for (int i = 0; i < 2; i++) {
        __m256i x = _mm256_cmpeq_epi16(_mm256_loadu_si256((const __m256i *)(a + 32 * i)), _mm256_loadu_si256((const __m256i *)(b + 32 * i)));
        __m256i y = _mm256_cmpeq_epi16(_mm256_loadu_si256((const __m256i *)(a + 32 * i + 16)), _mm256_loadu_si256((const __m256i *)(b + 32 * i + 16)));
        __m256i p = _mm256_permute4x64_epi64(_mm256_packs_epi16(x, y), 0xD8);
        m |= (u64)(u32)~_mm256_movemask_epi8(p) << (32 * i);
    }
    return m;
#else
    U any = 0; u64 m = 0;
    for (int i = 0; i < 64; i++) any |= a[i] ^ b[i];
    if (any) for (int i = 0; i < 64; i++) m |= (u64)(a[i] != b[i]) << i;
    return m;
#endif
}

/* Lists the changes of 64 elements, the first of which has position `first`; returns how many. Most that have one have one or two: two
 * are listed without asking, so there must be room for two. */
static inline i64 FN(list64)(u64 differ, i64 first, const U *old, const U *neu, u32 *pos, U *was, U *is) {
    i64 hits = __builtin_popcountll(differ), n = 2, i = __builtin_ctzll(differ), o;
    differ &= differ - 1;
    o = differ ? __builtin_ctzll(differ) : i;
    pos[0] = (u32)(first + i); was[0] = old[i]; is[0] = neu[i];
    pos[1] = (u32)(first + o); was[1] = old[o]; is[1] = neu[o];
    if (hits > 2)
        for (differ &= differ - 1; differ; differ &= differ - 1, n++) {
            i = __builtin_ctzll(differ);
            pos[n] = (u32)(first + i); was[n] = old[i]; is[n] = neu[i];
        }
    return hits;
}

static i64 FN(scan_chunk)(const U *old, const U *neu, i64 n, u32 *pos, U *was, U *is) {
    i64 hits = 0, j = 0;
    for (; j + 64 <= n; j += 64) {
        u64 m = FN(differ64)(old + j, neu + j);
        if (m) hits += FN(list64)(m, j, old + j, neu + j, pos + hits, was + hits, is + hits);
    }
    for (; j < n; j++) if (old[j] != neu[j]) { pos[hits] = (u32)j; was[hits] = old[j]; is[hits] = neu[j]; hits++; }
    return hits;
}

/* Rows in turn, while what a row can give at most still fits. Sets R_OFFSET, R_HITS and the lanes of each; returns rows done. */
i64 FN(wl_scan)(i64 *rows, i64 count, u32 *pos, U *was, U *is, i64 room, u64 *lanes) {
    i64 at = 0, r = 0;
    for (; r < count; r++) {
        i64 *row = rows + r * R_FIELDS;
        if (at + row[R_COUNT] > room) break;
        i64 hits = FN(scan_chunk)((const U *)row[R_OLD], (const U *)row[R_NEW], row[R_COUNT], pos + at, was + at, is + at);
        row[R_OFFSET] = at; row[R_HITS] = hits;
        lanes[2 * r] = lanes[2 * r + 1] = 0;
        FN(wl_digest_moves)((u64)row[R_START], pos + at, was + at, is + at, hits, lanes + 2 * r);
        at += hits;
    }
    return r;
}

/* target[start + pos] = values, for each row */
void FN(wl_write)(const i64 *rows, i64 count, const u32 *pos, const U *values) {
    for (i64 r = 0; r < count; r++) {
        const i64 *row = rows + r * R_FIELDS;
        U *target = (U *)row[R_OLD];
        const u32 *p = pos + row[R_OFFSET];
        const U *v = values + row[R_OFFSET];
        i64 n = row[R_HITS];
        for (i64 j = 0; j < n; j++) { ASK(target + p[j + NEAR < n ? j + NEAR : n - 1]); target[p[j]] = v[j]; }
    }
}

/* fp32 -> bf16 to nearest even (NaN: quiet, sign kept), against a shadow that is brought up to date. W == 2 only. */
#if W == 2
static inline U cast_one(u32 x) {
    u32 even = (x + 0x7FFF + ((x >> 16) & 1)) >> 16, nan = ((x >> 16) & 0x8000) | 0x7FC0;
    return (U)((x & 0x7FFFFFFF) > 0x7F800000 ? nan : even);
}
static inline void cast64(const u32 *f, U *out) {
#ifdef __AVX512BF16__
    /* The instruction rounds as cast_one does, but for subnormal numbers (to zero) and NaN (payload kept): those are done over. */
    enum { ODD = 0x80 | 0x20 | 0x01 };
    u32 odd = 0;
    for (int h = 0; h < 64; h += 32) {
        __m512 a = _mm512_loadu_ps(f + h), b = _mm512_loadu_ps(f + h + 16);
        odd |= _mm512_fpclass_ps_mask(a, ODD) | _mm512_fpclass_ps_mask(b, ODD);
        _mm512_storeu_si512(out + h, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
    if (!odd) return;
#endif
    for (int i = 0; i < 64; i++) out[i] = cast_one(f[i]);
}
static i64 cast_chunk(const u32 *master, U *shadow, i64 n, u32 *pos, U *was, U *is) {
    enum { STRETCH = 2048 };
    U cast[STRETCH] __attribute__((aligned(64)));
    u64 differ[STRETCH / 64];
    int at[STRETCH / 64];
    i64 hits = 0, j = 0;
    for (; j + STRETCH <= n; j += STRETCH) {
        /* Which 64 have a change is not to be foretold, so they are listed without a branch. */
        int found = 0;
        for (int q = 0; q < STRETCH / 64; q++) {
            cast64(master + j + 64 * q, cast + 64 * q);
            differ[q] = FN(differ64)(shadow + j + 64 * q, cast + 64 * q);
            at[found] = q;
            found += differ[q] != 0;
        }
        for (int k = 0; k < found; k++) {
            i64 i = j + 64 * at[k];
            hits += FN(list64)(differ[at[k]], i, shadow + i, cast + 64 * at[k], pos + hits, was + hits, is + hits);
            memcpy(shadow + i, cast + 64 * at[k], 64 * sizeof(U));
        }
    }
    for (; j < n; j++) {
        U c = cast_one(master[j]);
        if (c != shadow[j]) { pos[hits] = (u32)j; was[hits] = shadow[j]; is[hits] = c; hits++; shadow[j] = c; }
    }
    return hits;
}
/* Rows in turn, as wl_scan (R_OLD: address of the shadow, R_NEW: of the masters). */
i64 wl_cast(i64 *rows, i64 count, u32 *pos, U *was, U *is, i64 room, u64 *lanes) {
    i64 at = 0, r = 0;
    for (; r < count; r++) {
        i64 *row = rows + r * R_FIELDS;
        if (at + row[R_COUNT] > room) break;
        i64 hits = cast_chunk((const u32 *)row[R_NEW], (U *)row[R_OLD], row[R_COUNT], pos + at, was + at, is + at);
        row[R_OFFSET] = at; row[R_HITS] = hits;
        lanes[2 * r] = lanes[2 * r + 1] = 0;
        FN(wl_digest_moves)((u64)row[R_START], pos + at, was + at, is + at, hits, lanes + 2 * r);
        at += hits;
    }
    return r;
}
#endif

/* ---- runs of step sizes less one: quotients in unary (CAP: escape), remainders, escaped values in full ---- */
static i64 FN(value_bits)(const U *m, i64 n, int r) {
    i64 bits = n * (r + 1);
    for (i64 i = 0; i < n; i++) { u64 q = (u64)m[i] >> r; bits += q < CAP ? (i64)q : CAP + BITS; }
    return bits;
}
static int FN(value_r)(const U *m, i64 n, i64 *bits) {
    u64 sum = 0; /* of bit lengths: step sizes have a long tail */
    for (i64 i = 0; i < n; i++) sum += (u64)bitlen(m[i]);
    int mid = n ? (int)(sum / (u64)n) : 0, best = 0; i64 least = -1;
    for (int r = mid ? mid - 1 : 0; r <= mid + 1 && r < BITS; r++) { i64 b = FN(value_bits)(m, n, r); if (least < 0 || b < least) { least = b; best = r; } }
    *bits = least < 0 ? 0 : least;
    return best;
}
static i64 FN(put_values)(u64 *out, i64 at, const U *m, i64 n, int r) {
    for (i64 i = 0; i < n; i++) { u64 q = (u64)m[i] >> r; at += q < CAP ? (i64)q : CAP; out[at >> 6] |= 1ull << (at & 63); at++; }
    u64 low = (1ull << r) - 1;
    for (i64 i = 0; i < n; i++) { put(out, at, m[i] & low, r); at += r; }
    for (i64 i = 0; i < n; i++) if (((u64)m[i] >> r) >= CAP) { put(out, at, m[i], BITS); at += BITS; }
    return at;
}
static i64 FN(get_values)(const u64 *in, i64 at, i64 bits, U *m, i64 n, int r) {
    if (!n) return at;
    if (at + n > bits || r < 0 || r >= BITS) return -1;
    i64 words = (bits + 63) >> 6, w = at >> 6, before = at, escapes = 0;
    u64 now = in[w] & (~0ull << (at & 63));
    for (i64 i = 0; i < n; i++) {
        while (!now) { if (++w >= words) return -1; now = in[w]; }
        i64 b = (w << 6) + __builtin_ctzll(now);
        now &= now - 1;
        i64 q = b - before;
        if (q > CAP) return -1;
        escapes += q == CAP;
        m[i] = (U)q;
        before = b + 1;
    }
    at = before;
    if (at + n * r + escapes * BITS > bits) return -1;
    i64 full = at + n * r;
    if (!escapes && r <= 56) {
        u64 mask = (1ull << r) - 1;
        if (r) for (i64 i = 0; i < n; i++) m[i] = (U)(((u64)m[i] << r) | peek(in, at + i * r, mask));
        return full;
    }
    for (i64 i = 0; i < n; i++) {
        if (m[i] == CAP) { m[i] = (U)get(in, full, BITS); full += BITS; }
        else m[i] = (U)(((u64)m[i] << r) | get(in, at, r));
        at += r;
    }
    return full;
}

/* Scratch of one thread, for chunks of at most `room` elements. */
typedef struct { u32 *gaps, *other; U *m, *x; uint8_t *sign, *class_of; } FN(scratch);

static int FN(take)(FN(scratch) *s, i64 room) {
    char *p = malloc((size_t)room * (4 + 4 + 2 * W + 2) + 2 * 4 * PAD + 192); /* vectors read past the last step */
    if (!p) return 0;
    s->gaps = (u32 *)p; s->other = s->gaps + room + PAD;
    s->m = (U *)(s->other + room + PAD); s->x = s->m + room;
    s->sign = (uint8_t *)(s->x + room); s->class_of = s->sign + room;
    return 1;
}

/* The steps of a run that are not one unit, less one, and the gaps between them; returns how many. `x` and `g` have a place to spare. */
static i64 FN(find_others)(const U *m, i64 n, U *x, u32 *g) {
    i64 others = 0, next = 0;
    for (i64 i = 0; i < n; i++) {
        x[others] = (U)(m[i] - 1); g[others] = (u32)(i - next);
        next = m[i] ? i + 1 : next;
        others += m[i] != 0;
    }
    return others;
}

/* How one class of n steps is coded best: sets K_MODE, K_R, K_X; returns the bits, signs included. */
static i64 FN(choose_values)(const U *m, i64 n, i64 *row, U *x, u32 *g) {
    i64 others = FN(find_others)(m, n, x, g);
    row[K_R] = row[K_X] = 0;
    if (!others) { row[K_MODE] = ONES; return n; }
    i64 plain = n * BITS, rice, gaps, exceptions = -1;
    int r = FN(value_r)(m, n, &rice);
    rice += n;
    if (others < n) {
        int xr, xk = gap_k(g, others, &gaps);
        i64 sizes;
        xr = FN(value_r)(x, others, &sizes);
        exceptions = n + gaps + sizes + 2 * bitlen((u64)others); /* their number is told in the class table */
        if (exceptions < rice && exceptions < plain) { row[K_MODE] = EXCEPTIONS; row[K_R] = xr | (i64)xk << 8; row[K_X] = others; return exceptions; }
    }
    if (plain <= rice) { row[K_MODE] = PLAIN; return plain; }
    row[K_MODE] = RICE; row[K_R] = r;
    return rice;
}

/* What a dense class costs, but for its n signs, in 1/256 bit: `sums` has the quotients that its steps have with each of TRIED parameters,
 * and those that the steps of more than one unit have with one unit less. */
static i64 FN(dense_cost)(i64 n, i64 ones, i64 bits, i64 all, const i64 *sums) {
    i64 gaps = gap_cost((u64)n, (u64)all), others = n - ones, least = (BITS - 1) * n, fewest = BITS * others;
    if (gaps > all << 8 && all >= n) gaps = all << 8; /* in unary */
    if (!others) return gaps;
    if (bits > 8 * others) return gaps + value_cost((u64)n, (u64)ones, (u64)bits); /* larger steps than the sums tell apart */
    for (int r = 0; r < TRIED; r++) {
        i64 all_steps = n * (r + 1) + sums[r], rest = others * (r + 1) + sums[TRIED + r];
        if (all_steps < least) least = all_steps;
        if (rest < fewest) fewest = rest;
    }
    least <<= 8;
    if (others < n) {
        i64 between = gap_cost((u64)others, (u64)n);
        if (between > n << 8) between = n << 8;
        between += (fewest + 2 * bitlen((u64)others)) << 8;
        if (between < least) least = between;
    }
    return gaps + least;
}

/* Those sums for each exponent. */
static void FN(weigh)(const U *was, const U *is, i64 n, int is_float, int shift, int mask, i64 (*sums)[2 * TRIED]) {
    for (i64 j = 0; j < n; j++) {
        U d = (U)(FN(order)(is[j], is_float) - FN(order)(was[j], is_float));
        U down = (U)(0 - (U)(d >> (BITS - 1)));
        u64 size = (U)((U)((d ^ down) - down) - 1);
        if (!size) continue;
        i64 *sum = sums[FN(expo)(was[j], shift, mask)];
        for (int r = 0; r < TRIED; r++) {
            u64 q = size >> r, less = (size - 1) >> r;
            sum[r] += q < CAP ? (i64)q : CAP + BITS;
            sum[TRIED + r] += less < CAP ? (i64)less : CAP + BITS;
        }
    }
}

/* Classes of exponents [lo, hi] for `hits` changes: the cheapest partition by dynamic programming. `sums`: for dense, NULL for fast. Returns
 * how many. */
static i64 FN(classes)(const i64 *hits, const i64 *ones, const i64 *bits, const i64 *total, const i64 (*sums)[2 * TRIED], i64 overhead, i64 *cls) {
    int e[256], m = 0, from[257];
    i64 cost[257];
    for (int i = 0; i < 256; i++) if (hits[i]) e[m++] = i;
    cost[0] = 0;
    for (int j = 1; j <= m; j++) {
        i64 n = 0, o = 0, b = 0, all = 0, sum[2 * TRIED] = {0};
        cost[j] = -1;
        for (int i = j - 1; i >= 0; i--) {
            n += hits[e[i]]; o += ones[e[i]]; b += bits[e[i]];
            for (int t = e[i]; t < (i + 1 < j ? e[i + 1] : e[i] + 1); t++) all += total[t];
            i64 c = cost[i] + overhead;
            if (sums) {
                for (int r = 0; r < 2 * TRIED; r++) sum[r] += sums[e[i]][r];
                c += FN(dense_cost)(n, o, b, all, sum);
            } else c += value_cost((u64)n, (u64)o, (u64)b);
            if (cost[j] < 0 || c < cost[j]) { cost[j] = c; from[j] = i; }
        }
    }
    i64 count = 0;
    for (int j = m; j > 0; j = from[j]) count++;
    i64 c = count;
    for (int j = m; j > 0; j = from[j]) {
        i64 *row = cls + --c * K_FIELDS, n = 0;
        for (int i = from[j]; i < j; i++) n += hits[e[i]];
        row[K_LO] = e[from[j]]; row[K_HI] = e[j - 1]; row[K_N] = n; row[K_K] = 0;
    }
    return count;
}

/* Bit j is set where the exponent of a[j] lies in a class, for 64 elements: (a[j] & field) - low <= span. */
#if defined(__AVX512BW__) && W <= 4
#define RANGES 1
static inline u64 FN(inside64)(const U *a, U field, U low, U span) {
    u64 m = 0;
#if W == 1
    __m512i x = _mm512_sub_epi8(_mm512_and_si512(_mm512_loadu_si512(a), _mm512_set1_epi8((char)field)), _mm512_set1_epi8((char)low));
    m = _mm512_cmple_epu8_mask(x, _mm512_set1_epi8((char)span));
#elif W == 2
    for (int i = 0; i < 2; i++) {
        __m512i x = _mm512_sub_epi16(_mm512_and_si512(_mm512_loadu_si512(a + 32 * i), _mm512_set1_epi16((short)field)), _mm512_set1_epi16((short)low));
        m |= (u64)_mm512_cmple_epu16_mask(x, _mm512_set1_epi16((short)span)) << (32 * i);
    }
#else
    for (int i = 0; i < 4; i++) {
        __m512i x = _mm512_sub_epi32(_mm512_and_si512(_mm512_loadu_si512(a + 16 * i), _mm512_set1_epi32((int)field)), _mm512_set1_epi32((int)low));
        m |= (u64)_mm512_cmple_epu32_mask(x, _mm512_set1_epi32((int)span)) << (16 * i);
    }
#endif
    return m;
}
#elif defined(__AVX2__) && W == 2
#define RANGES 1
static inline u64 FN(inside64)(const U *a, U field, U low, U span) {
    u64 m = 0;
    __m256i f = _mm256_set1_epi16((short)field), l = _mm256_set1_epi16((short)low), p = _mm256_set1_epi16((short)span);
    for (int i = 0; i < 2; i++) {
        __m256i x = _mm256_sub_epi16(_mm256_and_si256(_mm256_loadu_si256((const __m256i *)(a + 32 * i)), f), l);
        __m256i y = _mm256_sub_epi16(_mm256_and_si256(_mm256_loadu_si256((const __m256i *)(a + 32 * i + 16)), f), l);
        x = _mm256_cmpeq_epi16(_mm256_min_epu16(x, p), x);
        y = _mm256_cmpeq_epi16(_mm256_min_epu16(y, p), y);
        m |= (u64)(u32)_mm256_movemask_epi8(_mm256_permute4x64_epi64(_mm256_packs_epi16(x, y), 0xD8)) << (32 * i);
    }
    return m;
}
#endif
#define BLOCK 4096
#define WORDS (BLOCK / 64)
#if W == 2 && defined(__AVX512VBMI__)
/* The class of each element of a block, a byte each: one compare finds those of a class among 64 then, however many classes there are. */
#define LABELS 1
static void FN(label)(const U *a, int shift, int mask, const uint8_t *map, uint8_t *label) {
    const __m512i t0 = _mm512_loadu_si512(map), t1 = _mm512_loadu_si512(map + 64), t2 = _mm512_loadu_si512(map + 128),
                  t3 = _mm512_loadu_si512(map + 192), field = _mm512_set1_epi16((short)mask);
    const __m128i by = _mm_cvtsi32_si128(shift);
    for (int q = 0; q < BLOCK; q += 64) {
        __m512i lo = _mm512_and_si512(_mm512_srl_epi16(_mm512_loadu_si512(a + q), by), field);
        __m512i hi = _mm512_and_si512(_mm512_srl_epi16(_mm512_loadu_si512(a + q + 32), by), field);
        __m512i e = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(lo)), _mm512_cvtepi16_epi8(hi), 1);
        _mm512_store_si512(label + q, _mm512_mask_blend_epi8(_mm512_movepi8_mask(e), _mm512_permutex2var_epi8(t0, e, t1),
                                                             _mm512_permutex2var_epi8(t2, e, t3)));
    }
}
#define INSIDE(q) _mm512_cmpeq_epi8_mask(_mm512_load_si512(label + 64 * (q)), class)
#else
#define INSIDE(q) FN(inside64)(base + i + 64 * (q), field, low, span)
#endif

/* Gaps in the rank space of each class, in class order: fill[c] is the first free place of class c. */
static void FN(rank_gaps)(const U *base, i64 total, const u32 *pos, i64 n, const uint8_t *map, i64 count, const i64 *cls, int shift,
                          int mask, i64 *fill, u32 *gaps) {
    u32 seen[257];
    memset(seen, 0, sizeof seen);
    i64 i = 0, j = 0;
#ifdef RANGES
    U field = (U)((U)mask << shift);
    for (; i + BLOCK <= total && j < n; i += BLOCK) {
        u64 hit[WORDS];
#ifdef LABELS
        uint8_t label[BLOCK] __attribute__((aligned(64)));
        FN(label)(base + i, shift, mask, map, label);
#endif
        memset(hit, 0, sizeof hit);
        for (; j < n && pos[j] < i + BLOCK; j++) hit[(pos[j] - i) >> 6] |= 1ull << (pos[j] & 63);
        for (i64 c = 0; c < count; c++) {
            const i64 *row = cls + c * K_FIELDS;
            U low = (U)((U)row[K_LO] << shift), span = (U)((U)(row[K_HI] - row[K_LO]) << shift);
#ifdef LABELS
            const __m512i class = _mm512_set1_epi8((char)c);
#endif
            u32 s = seen[c];
            i64 at = fill[c];
            for (int q = 0; q < WORDS; q++) {
                u64 m = INSIDE(q), h = m & hit[q];
                u32 whole = (u32)__builtin_popcountll(m), past = 0;
                while (h) {
                    u32 upto = (u32)__builtin_popcountll(m & (h ^ (h - 1))); /* elements of the class up to this one */
                    h &= h - 1;
                    gaps[at++] = s + upto - past - 1;
                    s = 0; past = upto;
                }
                s += whole - past;
            }
            seen[c] = s; fill[c] = at;
        }
    }
#else
    (void)total; (void)count; (void)cls;
#endif
    for (; j < n; j++) {
        i64 stop = pos[j];
        for (; i < stop; i++) seen[map[FN(expo)(base[i], shift, mask)]]++;
        int c = map[FN(expo)(base[i++], shift, mask)];
        gaps[fill[c]++] = seen[c];
        seen[c] = 0;
    }
}

/* One chunk. `chunk` (T_FIELDS) and `cls` (MAXCLASSES rows) are set; returns the bytes written to `out`. */
static i64 FN(encode_chunk)(const U *base, const U *neu, i64 total, const u32 *pos, const U *was, const U *is, i64 n, int is_float,
                            int shift, int mask, int dense, FN(scratch) *s, u64 *out, i64 *chunk, i64 *cls) {
    memset(chunk, 0, T_FIELDS * sizeof(i64));
    if (!n) return 0;
    i64 hits[256] = {0}, ones[256] = {0}, bits[256] = {0}, all[256] = {0};
    /* Ones, and bits above. Neighbours often have one exponent: in turn on two tables, none waits for the store of the one before. */
    u64 both[2][256] = {{0}};
    u32 count_of[2][256] = {{0}};
    for (i64 j = 0; j < n; j++) {
        U d = (U)(FN(order)(is[j], is_float) - FN(order)(was[j], is_float));
        U down = (U)(0 - (U)(d >> (BITS - 1)));
        U size = (U)((U)((d ^ down) - down) - 1);
        int e = FN(expo)(was[j], shift, mask);
        s->class_of[j] = (uint8_t)e;
        count_of[j & 1][e]++; both[j & 1][e] += (u64)(size == 0) + ((u64)bitlen(size) << 32);
    }
    for (int e = 0; e < 256; e++) {
        u64 sum = both[0][e] + both[1][e];
        hits[e] = (i64)count_of[0][e] + count_of[1][e]; ones[e] = (i64)(u32)sum; bits[e] = (i64)(sum >> 32);
    }
    i64 sums[256][2 * TRIED];
    if (dense) {
        i64 stride = (total >> 16) | 1;
        for (i64 i = 0; i < total; i += stride) all[FN(expo)(base[i], shift, mask)] += stride;
        memset(sums, 0, sizeof sums);
        FN(weigh)(was, is, n, is_float, shift, mask, sums);
    }
    i64 overhead = dense && n >= MANY && n < total >> 8 ? LATER : OVERHEAD, fill[MAXCLASSES], at = 0;
    i64 count = FN(classes)(hits, ones, bits, all, dense ? (const i64 (*)[2 * TRIED])sums : NULL, overhead, cls);
    uint8_t map[256];
    memset(map, 0, sizeof map);
    for (i64 c = 0; c < count; c++) {
        i64 *row = cls + c * K_FIELDS;
        for (i64 e = row[K_LO]; e <= row[K_HI]; e++) map[e] = (uint8_t)c;
        fill[c] = at; at += row[K_N];
    }
    /* Few classes have their counters in one word, for SPAN changes at a time: no change waits for the store of the one before. */
    for (i64 from = 0; from < n; from += SPAN) {
        i64 to = n - from < SPAN ? n : from + SPAN;
        u64 counts = 0;
        for (i64 j = from; j < to; j++) {
            U d = (U)(FN(order)(is[j], is_float) - FN(order)(was[j], is_float));
            int c = map[s->class_of[j]];
            i64 t;
            if (count <= 8) { t = fill[c] + (i64)(counts >> (8 * c) & 255); counts += 1ull << (8 * c); }
            else t = fill[c]++;
            U down = (U)(0 - (U)(d >> (BITS - 1)));
            s->sign[t] = down & 1;
            s->m[t] = (U)((U)((d ^ down) - down) - 1);
        }
        if (count <= 8) for (i64 c = 0; c < count; c++) fill[c] += (i64)(counts >> (8 * c) & 255);
    }
    i64 total_bits = 0;
    if (dense) {
        /* exponents of no class share a counter that nobody reads */
        uint8_t with_rest[256];
        i64 rest = count < 256 ? count : 255;
        memset(with_rest, (int)rest, sizeof with_rest);
        at = 0;
        for (i64 c = 0; c < count; c++) {
            for (i64 e = cls[c * K_FIELDS + K_LO]; e <= cls[c * K_FIELDS + K_HI]; e++) with_rest[e] = (uint8_t)c;
            fill[c] = at; at += cls[c * K_FIELDS + K_N];
        }
        FN(rank_gaps)(base, total, pos, n, with_rest, count, cls, shift, mask, fill, s->gaps);
    } else {
        s->gaps[0] = pos[0];
        for (i64 j = 1; j < n; j++) s->gaps[j] = pos[j] - pos[j - 1] - 1;
        chunk[T_K] = gap_k(s->gaps, n, &total_bits);
    }
    at = 0;
    for (i64 c = 0; c < count; c++) {
        i64 *row = cls + c * K_FIELDS, b = 0;
        if (dense) row[K_K] = gap_k(s->gaps + at, row[K_N], &b);
        total_bits += b + FN(choose_values)(s->m + at, row[K_N], row, s->x, s->other);
        at += row[K_N];
    }
    if (neu && total_bits >= total * BITS) {
        chunk[T_ENCODING] = E_RAW; chunk[T_NBYTES] = total * W;
        memcpy(out, neu, (size_t)(total * W));
        return total * W;
    }
    memset(out, 0, (size_t)((total_bits + 63) / 64 * 8 + 16));
    i64 bit = 0;
    if (dense) { at = 0; for (i64 c = 0; c < count; c++) { i64 *row = cls + c * K_FIELDS; bit = put_gaps(out, bit, s->gaps + at, row[K_N], (int)row[K_K]); at += row[K_N]; } }
    else bit = put_gaps(out, bit, s->gaps, n, (int)chunk[T_K]);
    at = 0;
    for (i64 c = 0; c < count; c++) {
        i64 *row = cls + c * K_FIELDS, m = row[K_N];
        U *v = s->m + at;
        if (row[K_MODE] == PLAIN) {
            for (i64 i = 0, j = 0; i < m; j++) if (map[s->class_of[j]] == c) { put(out, bit, is[j], BITS); bit += BITS; i++; }
        } else {
            bit = put_signs(out, bit, s->sign + at, m);
            if (row[K_MODE] == RICE) bit = FN(put_values)(out, bit, v, m, (int)row[K_R]);
            if (row[K_MODE] == EXCEPTIONS) {
                i64 others = FN(find_others)(v, m, s->x, s->other);
                bit = put_gaps(out, bit, s->other, others, (int)(row[K_R] >> 8));
                bit = FN(put_values)(out, bit, s->x, others, (int)(row[K_R] & 255));
            }
        }
        at += m;
    }
    chunk[T_ENCODING] = dense ? E_DENSE : E_FAST; chunk[T_CLASSES] = count; chunk[T_NBYTES] = (bit + 7) >> 3;
    return chunk[T_NBYTES];
}

/* Rows in turn, while the worst case still fits into `room` bytes of `out` and `cls_room` classes. Returns rows done, -1: no memory. */
i64 FN(wl_encode)(const i64 *rows, i64 count, const u32 *pos, const U *was, const U *is, i64 is_float, i64 shift, i64 mask, i64 dense,
                  i64 *chunks, i64 *cls, i64 cls_room, u64 *out, i64 room, i64 *sizes) {
    FN(scratch) s;
    i64 most = 0, at = 0, used = 0, r = 0;
    for (i64 i = 0; i < count; i++) if (rows[i * R_FIELDS + R_HITS] > most) most = rows[i * R_FIELDS + R_HITS];
    if (!FN(take)(&s, most + 8)) return -1;
    for (; r < count; r++) {
        const i64 *row = rows + r * R_FIELDS;
        i64 total = row[R_COUNT], n = row[R_HITS], o = row[R_OFFSET];
        if (at + total * W + total / 8 + 64 > room || used + MAXCLASSES > cls_room) break;
        i64 bytes = FN(encode_chunk)((const U *)row[R_OLD], (const U *)row[R_NEW], total, pos + o, was + o, is + o, n, (int)is_float,
                                     (int)shift, (int)mask, (int)dense, &s, (u64 *)((char *)out + at), chunks + r * T_FIELDS, cls + used * K_FIELDS);
        used += chunks[r * T_FIELDS + T_CLASSES];
        at += bytes;
    }
    free(s.gaps);
    sizes[0] = at; sizes[1] = used;
    return r;
}

/* The k-th set bit of m (k >= 1, there are that many), alone. */
static inline u64 FN(pick)(u64 m, i64 k) {
#ifdef __BMI2__
    return _pdep_u64(1ull << (k - 1), m);
#else
    for (; k > 1; k--) m &= m - 1;
    return m & -m;
#endif
}

/* Positions of a dense chunk: walks the base and counts each class down to its next hit. Returns how many it wrote. */
static i64 FN(find_ranks)(const U *base, i64 total, int shift, int mask, const uint8_t *map, i64 count, const i64 *cls, i64 *fill,
                          const i64 *end, const u32 *gaps, u32 *pos) {
    const u32 *first = pos;
    i64 left[257], i = 0;
    for (i64 c = 0; c <= count; c++) left[c] = INT64_MAX;
    for (i64 c = 0; c < count; c++) if (fill[c] < end[c]) left[c] = (i64)gaps[fill[c]++] + 1;
#ifdef RANGES
    U field = (U)((U)mask << shift);
    for (; i + BLOCK <= total; i += BLOCK) {
        u64 found[WORDS];
#ifdef LABELS
        uint8_t label[BLOCK] __attribute__((aligned(64)));
        FN(label)(base + i, shift, mask, map, label);
#endif
        memset(found, 0, sizeof found);
        for (i64 c = 0; c < count; c++) {
            const i64 *row = cls + c * K_FIELDS;
            U low = (U)((U)row[K_LO] << shift), span = (U)((U)(row[K_HI] - row[K_LO]) << shift);
#ifdef LABELS
            const __m512i class = _mm512_set1_epi8((char)c);
#endif
            i64 l = left[c];
            if (l == INT64_MAX) continue;
            for (int q = 0; q < WORDS; q++) {
                u64 m = INSIDE(q);
                i64 inside = __builtin_popcountll(m);
                if (l > inside) { l -= inside; continue; }
                i64 counted = 0;
                do {
                    found[q] |= FN(pick)(m, l + counted);
                    counted += l;
                    l = fill[c] < end[c] ? (i64)gaps[fill[c]++] + 1 : INT64_MAX;
                } while (l <= inside - counted);
                if (l == INT64_MAX) break;
                l -= inside - counted;
            }
            left[c] = l;
        }
        for (int q = 0; q < WORDS; q++) for (u64 m = found[q]; m; m &= m - 1) *pos++ = (u32)(i + 64 * q + __builtin_ctzll(m));
    }
#else
    (void)cls;
#endif
    for (; i < total; i++) {
        int c = map[FN(expo)(base[i], shift, mask)];
        if (--left[c] == 0) { *pos++ = (u32)i; left[c] = fill[c] < end[c] ? (i64)gaps[fill[c]++] + 1 : INT64_MAX; }
    }
    return pos - first;
}

/* New bits of n changes from their old ones and the next steps of their classes: fill[c] is the next step of class c. Returns 0 when a
 * change is of no class, or of one whose steps are used up. */
static int FN(take_steps)(const U *was, U *is, i64 n, const uint8_t *map, i64 count, int is_float, int shift, int mask,
                          const FN(scratch) *s, i64 *fill, const i64 *end) {
    i64 j = 0;
#if W == 2 && defined(__AVX512VBMI__) && defined(__AVX512VBMI2__)
    /* 64 at a time: the steps of a class lie in a row, so they are expanded to the places that its mask has. */
    if (count <= 16) {
        const __m512i t0 = _mm512_loadu_si512(map), t1 = _mm512_loadu_si512(map + 64), t2 = _mm512_loadu_si512(map + 128),
                      t3 = _mm512_loadu_si512(map + 192), ones = _mm512_set1_epi16(1), top = _mm512_set1_epi16((short)0x8000);
        const __m512i field = _mm512_set1_epi16((short)mask);
        const __m128i by = _mm_cvtsi32_si128(shift);
        for (; j + 64 <= n; j += 64) {
            __m512i u[2], size[2], plain[2];
            __m512i sign = _mm512_setzero_si512();
            for (int h = 0; h < 2; h++) { u[h] = _mm512_loadu_si512(was + j + 32 * h); size[h] = _mm512_setzero_si512(); }
            __m512i e = _mm512_inserti64x4(
                _mm512_castsi256_si512(_mm512_cvtepi16_epi8(_mm512_and_si512(_mm512_srl_epi16(u[0], by), field))),
                _mm512_cvtepi16_epi8(_mm512_and_si512(_mm512_srl_epi16(u[1], by), field)), 1);
            __m512i class = _mm512_mask_blend_epi8(_mm512_movepi8_mask(e), _mm512_permutex2var_epi8(t0, e, t1),
                                                   _mm512_permutex2var_epi8(t2, e, t3));
            u64 seen = 0;
            for (int c = 0; c < (int)count; c++) {
                u64 m = _mm512_cmpeq_epi8_mask(class, _mm512_set1_epi8((char)c));
                i64 t = fill[c], low = __builtin_popcountll((u32)m), all = low + __builtin_popcountll(m >> 32);
                if (t + all > end[c]) return 0;
                seen |= m;
                size[0] = _mm512_or_si512(size[0], _mm512_maskz_expand_epi16((__mmask32)m, _mm512_loadu_si512(s->m + t)));
                size[1] = _mm512_or_si512(size[1], _mm512_maskz_expand_epi16((__mmask32)(m >> 32), _mm512_loadu_si512(s->m + t + low)));
                sign = _mm512_or_si512(sign, _mm512_maskz_expand_epi8(m, _mm512_loadu_si512(s->sign + t)));
                fill[c] = t + all;
            }
            if (~seen) return 0;
            u64 down = _mm512_test_epi8_mask(sign, _mm512_set1_epi8(1)), whole = _mm512_test_epi8_mask(sign, _mm512_set1_epi8(2));
            for (int h = 0; h < 2; h++) {
                __mmask32 d = (__mmask32)(down >> (32 * h)), w = (__mmask32)(whole >> (32 * h));
                __m512i step = _mm512_add_epi16(size[h], ones), v = u[h];
                plain[h] = size[h];
                step = _mm512_mask_sub_epi16(step, d, _mm512_setzero_si512(), step);
                if (is_float) v = _mm512_xor_si512(v, _mm512_or_si512(_mm512_srai_epi16(v, 15), top));
                v = _mm512_add_epi16(v, step);
                if (is_float) v = _mm512_xor_si512(v, _mm512_or_si512(_mm512_xor_si512(_mm512_srai_epi16(v, 15), _mm512_set1_epi16(-1)), top));
                _mm512_storeu_si512(is + j + 32 * h, _mm512_mask_blend_epi16(w, v, plain[h]));
            }
        }
    }
#endif
    /* Signs are coin tosses: no branch may depend on one. */
    for (; j < n; j++) {
        int c = map[FN(expo)(was[j], shift, mask)];
        i64 t = fill[c];
        if ((c >= count) | (t >= end[c])) return 0;
        fill[c] = t + 1;
        U down = (U)(0 - (U)(s->sign[t] & 1)); /* all ones: down */
        U size = (U)(s->m[t] + 1);
        U moved = FN(disorder)((U)(FN(order)(was[j], is_float) + (U)((size ^ down) - down)), is_float);
        is[j] = s->sign[t] & 2 ? s->m[t] : moved;
    }
    return 1;
}

/* One chunk against its base, and into it if `write`. Returns the hits, -1: the bits are damaged, -2: they do not belong to this base;
 * the base is as it was then. */
static i64 FN(decode_chunk)(U *base, i64 total, const u64 *in, i64 bits, const i64 *chunk, const i64 *cls, int is_float, int shift,
                            int mask, int write, FN(scratch) *s, u32 *pos, U *was, U *is, i64 room) {
    i64 count = chunk[T_CLASSES], n = 0, start[MAXCLASSES + 1], end[MAXCLASSES + 1], fill[MAXCLASSES + 1];
    uint8_t map[256];
    if (count < 1 || count > MAXCLASSES) return -1;
    memset(map, (int)count, sizeof map);
    i64 low = 0;
    for (i64 c = 0; c < count; c++) {
        const i64 *row = cls + c * K_FIELDS;
        if (row[K_N] < 1 || row[K_N] > total - n || row[K_LO] < low || row[K_HI] < row[K_LO] || row[K_HI] > mask) return -1; /* beyond the mask contexts wrap, and classes overlap */
        for (i64 e = row[K_LO]; e <= row[K_HI]; e++) map[e] = (uint8_t)c;
        low = row[K_HI] + 1;
        start[c] = fill[c] = n; n += row[K_N]; end[c] = n;
    }
    if (n > room) return -1;
    i64 at = 0;
    if (chunk[T_ENCODING] == E_FAST) {
        if ((at = get_positions(in, bits, s->gaps, pos, n, (int)chunk[T_K], total)) < 0) return -1;
        for (i64 j = 0; j < n && j < AHEAD; j++) ASK(base + pos[j]); /* on their way while signs and sizes are read */
    } else {
        for (i64 c = 0; c < count; c++)
            if ((at = get_gaps(in, at, bits, s->gaps + start[c], end[c] - start[c], (int)cls[c * K_FIELDS + K_K])) < 0) return -1;
        if (FN(find_ranks)(base, total, shift, mask, map, count, cls, fill, end, s->gaps, pos) != n) return -2;
    }
    for (i64 c = 0; c < count; c++) {
        const i64 *row = cls + c * K_FIELDS;
        i64 m = row[K_N];
        U *v = s->m + start[c];
        uint8_t *sign = s->sign + start[c];
        if (at + m > bits) return -1;
        if (row[K_MODE] == PLAIN) {
            if (at + m * BITS > bits) return -1;
            for (i64 i = 0; i < m; i++) { v[i] = (U)get(in, at, BITS); at += BITS; sign[i] = 2; }
            continue;
        }
        get_signs(in, at, sign, m);
        at += m;
        if (row[K_MODE] == RICE) {
            if ((at = FN(get_values)(in, at, bits, v, m, (int)row[K_R])) < 0) return -1;
        } else if (row[K_MODE] == ONES || row[K_MODE] == EXCEPTIONS) {
            memset(v, 0, (size_t)m * W);
            if (row[K_MODE] == EXCEPTIONS) {
                i64 others = row[K_X];
                if (others < 0 || others > m) return -1;
                if ((at = get_gaps(in, at, bits, s->other, others, (int)(row[K_R] >> 8))) < 0) return -1;
                if ((at = FN(get_values)(in, at, bits, s->x, others, (int)(row[K_R] & 255))) < 0) return -1;
                i64 p = -1;
                for (i64 i = 0; i < others; i++) { p += (i64)s->other[i] + 1; if (p >= m) return -1; v[p] = (U)(s->x[i] + 1); }
            }
        } else return -1;
    }
    if (bits - at >= 8) return -1;
    memcpy(fill, start, (size_t)count * sizeof(i64));
    fill[count] = end[count] = 0; /* contexts of no class */
    for (i64 b = 0; b < n; b += AHEAD) {
        i64 e = b + AHEAD < n ? b + AHEAD : n, f = e + AHEAD < n ? e + AHEAD : n;
        for (i64 j = e; j < f; j++) ASK(base + pos[j]);
        for (i64 j = b; j < e; j++) was[j] = base[pos[j]];
        if (!FN(take_steps)(was + b, is + b, e - b, map, count, is_float, shift, mask, s, fill, end)) {
            if (write) for (i64 j = 0; j < b; j++) base[pos[j]] = was[j];
            return -2;
        }
        if (write) for (i64 j = b; j < e; j++) base[pos[j]] = is[j];
    }
    return n;
}

/* Rows in turn (R_NEW: address of the chunk's coded bytes). Sets R_OFFSET, R_HITS and lanes; returns rows done (fewer: no room left),
 * or -1 - row: damaged, -(1 << 40) - row: not this base, -(1 << 41): no memory. With `write` the new bits are put into the base at once,
 * while its lines are at hand; a failure puts the old bits back first. */
i64 FN(wl_decode)(i64 *rows, i64 count, const i64 *chunks, const i64 *cls, i64 is_float, i64 shift, i64 mask, i64 write, i64 longest,
                  u32 *pos, U *was, U *is, i64 room, u64 *lanes) {
    i64 most = 0, at = 0, used = 0, r = 0, bad = 0;
    for (i64 i = 0, c = 0; i < count; i++) {
        i64 hits = 0, total = rows[i * R_FIELDS + R_COUNT];
        for (i64 k = 0; k < chunks[i * T_FIELDS + T_CLASSES]; k++) hits += cls[c++ * K_FIELDS + K_N];
        if (hits > total) hits = total;
        if (hits > most) most = hits;
    }
    FN(scratch) s;
    u64 *in = malloc((size_t)longest + 32);
    if (!in) return -((i64)1 << 41);
    if (!FN(take)(&s, most + 8)) { free(in); return -((i64)1 << 41); }
    for (; r < count; r++) {
        i64 *row = rows + r * R_FIELDS;
        const i64 *chunk = chunks + r * T_FIELDS;
        i64 total = row[R_COUNT], nbytes = chunk[T_NBYTES], hits = 0;
        U *base = (U *)row[R_OLD];
        if (chunk[T_ENCODING] != E_NONE) {
            i64 bound = total;
            if (chunk[T_ENCODING] != E_RAW) { bound = 0; for (i64 c = 0; c < chunk[T_CLASSES]; c++) bound += cls[(used + c) * K_FIELDS + K_N]; }
            if (at + bound > room) break;
            memcpy(in, (const void *)row[R_NEW], (size_t)nbytes);
            memset((char *)in + nbytes, 0, 24);
            if (chunk[T_ENCODING] == E_RAW) {
                hits = nbytes == total * W ? FN(scan_chunk)(base, (const U *)in, total, pos + at, was + at, is + at) : -1;
                if (write && hits >= 0) memcpy(base, in, (size_t)nbytes);
            } else hits = FN(decode_chunk)(base, total, in, nbytes * 8, chunk, cls + used * K_FIELDS, (int)is_float, (int)shift, (int)mask, (int)write, &s, pos + at, was + at, is + at, room - at);
            if (hits < 0) { bad = hits == -1 ? -1 - r : -((i64)1 << 40) - r; break; }
            used += chunk[T_CLASSES];
        }
        row[R_OFFSET] = at; row[R_HITS] = hits;
        lanes[2 * r] = lanes[2 * r + 1] = 0;
        FN(wl_digest_moves)((u64)row[R_START], pos + at, was + at, is + at, hits, lanes + 2 * r);
        at += hits;
    }
    free(in); free(s.gaps);
    if (bad && write) FN(wl_write)(rows, r, pos, was);
    return bad ? bad : r;
}

#undef BITS
#undef SIGN
#undef RANGES
#undef BLOCK
#undef LABELS
#undef INSIDE
#undef WORDS
#endif
