/* The operations of a model on CPUs with AMX, for bfloat16, and sampling: see `cpu.py`, which builds
 * and calls this, and `kernels/__init__.py` for what each does.
 *
 * No result of a row depends on which other rows are computed with it: every sum is taken in an
 * order that only the row itself decides (He et al., "Defeating nondeterminism in LLM inference",
 * 2025).
 */

#define _GNU_SOURCE
#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef uint16_t bf16;

enum {
    ROWS = 16,      /* of a tile */
    ROW_BYTES = 64, /* of a tile: 16 float32, or 16 pairs of bf16 */
    PAIRS = 32,     /* bf16 in a row of a tile */
    TILE = ROWS * PAIRS,
    AHEAD = 8192,   /* bytes of a weight that are prefetched */
    MAX_DIM = 256,  /* of a head */
};

#define NEVER (-1e30f) /* the score of a key that is not seen */
#define MIN(a, b) ((a) < (b) ? (a) : (b))

static float to_float(bf16 x)
{
    union { uint32_t bits; float value; } u = {(uint32_t)x << 16};
    return u.value;
}

static bf16 to_bf16(float x)
{
    union { float value; uint32_t bits; } u = {x};
    if (x != x)
        return 0x7fc0;
    return (u.bits + 0x7fff + (u.bits >> 16 & 1)) >> 16; /* to nearest, ties to even */
}

/* Thread i gets the i-th of the cores that this process may use. */
void bind_threads(void)
{
    cpu_set_t allowed;
    sched_getaffinity(0, sizeof allowed, &allowed);
    #pragma omp parallel
    {
        int before = omp_get_thread_num();
        for (int core = 0; core < CPU_SETSIZE; core++) {
            if (!CPU_ISSET(core, &allowed) || before--)
                continue;
            cpu_set_t own;
            CPU_ZERO(&own);
            CPU_SET(core, &own);
            sched_setaffinity(0, sizeof own, &own);
            break;
        }
    }
}

/* e^x for x <= 88; 0 where it would be denormal, which would cost a hundred cycles. Within 2 units
 * in the last place. */
static __m512 exp16(__m512 x)
{
    const __m512 lowest = _mm512_set1_ps(-87);
    const __mmask16 normal = _mm512_cmp_ps_mask(x, lowest, _CMP_GE_OQ);
    x = _mm512_max_ps(x, lowest);
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f); /* Cephes' polynomial */
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1)));
    return _mm512_maskz_scalef_ps(normal, p, n);
}

static __m512 load16(const bf16 *x)
{
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

static void store16(bf16 *out, __m512 x)
{
    _mm256_storeu_si256((__m256i *)out, (__m256i)_mm512_cvtneps_pbh(x));
}

/* -- tiles -- */

/* Ask the kernel for AMX's registers. Returns 0 where it grants them. */
int request_amx(void)
{
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
    return (int)syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA);
}

struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

/* Tiles 0, 1: `upper` rows; 2, 3: `lower` rows; 4: upper; 5: lower; 6, 7: 16 rows. */
static void configure(int upper, int lower)
{
    struct tile_config config = {.palette = 1};
    const uint8_t rows[8] = {upper, upper, lower, lower, upper, lower, ROWS, ROWS};
    for (int i = 0; i < 8; i++) {
        config.rows[i] = rows[i] ? rows[i] : 1; /* 0 rows are not allowed: it is not used then */
        config.row_bytes[i] = ROW_BYTES;
    }
    _tile_loadconfig(&config);
}

/* -- linear -- */

/* [n, k], laid out as [n / 16, k / 2, 16, 2], so that 32 of k for 16 of n are a tile; in
 * 16 bits: bf16;
 *  8 bits: int8, and scales [n] float;
 *  4 bits: a tile's row is 16 bytes, the lower halves its first 16 values, the upper halves its
 *          last; scales [n / 16, k / 32, 2, 16] fp16, by which values are multiplied, then added.
 */
struct weight {
    const void *values, *scales;
    int64_t bits;
};

/* Tiles are read too seldom for the processor to foresee the next ones. */
static void prefetch(const char *from, int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i += 64)
        _mm_prefetch(from + i, _MM_HINT_T0);
}

static void unpack8(const int8_t *tile, bf16 *out)
{
    for (int i = 0; i < TILE; i += 2 * ROWS) {
        const __m512 first = _mm512_cvtepi32_ps(
            _mm512_cvtepi8_epi32(_mm_load_si128((const __m128i *)(tile + i))));
        const __m512 last = _mm512_cvtepi32_ps(
            _mm512_cvtepi8_epi32(_mm_load_si128((const __m128i *)(tile + i + ROWS))));
        _mm512_store_si512(out + i, (__m512i)_mm512_cvtne2ps_pbh(last, first));
    }
}

static void unpack4(const uint8_t *tile, const uint16_t *scales, bf16 *out)
{
    const __m512i firsts = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    const __m512i lasts = _mm512_add_epi32(firsts, _mm512_set1_epi32(ROWS / 2));
    const __m512 scale = _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)scales));
    const __m512 offset = _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)scales + 1));
    const __m512 first_scale = _mm512_permutexvar_ps(firsts, scale);
    const __m512 first_offset = _mm512_permutexvar_ps(firsts, offset);
    const __m512 last_scale = _mm512_permutexvar_ps(lasts, scale);
    const __m512 last_offset = _mm512_permutexvar_ps(lasts, offset);
    for (int i = 0; i < ROWS; i++) {
        const __m512i both =
            _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i *)(tile + i * ROWS)));
        const __m512 first = _mm512_fmadd_ps(
            _mm512_cvtepi32_ps(_mm512_and_si512(both, _mm512_set1_epi32(15))), first_scale,
            first_offset);
        const __m512 last = _mm512_fmadd_ps(
            _mm512_cvtepi32_ps(_mm512_srli_epi32(both, 4)), last_scale, last_offset);
        _mm512_store_si512(out + i * PAIRS, (__m512i)_mm512_cvtne2ps_pbh(last, first));
    }
}

/* Tile `i` of all of a weight's, as bf16: there, or unpacked to `room`. */
static const bf16 *tile_of(const struct weight *w, int64_t i, bf16 *room, int is_unpacked)
{
    if (w->bits == 16)
        return (const bf16 *)w->values + i * TILE;
    if (!is_unpacked && w->bits == 8)
        unpack8((const int8_t *)w->values + i * TILE, room);
    else if (!is_unpacked)
        unpack4((const uint8_t *)w->values + i * TILE / 2,
                (const uint16_t *)w->scales + i * 2 * ROWS, room);
    return room;
}

static void store_row(void *out, int is_float, int64_t offset, __m512 x, const bf16 *bias)
{
    if (bias)
        x = _mm512_add_ps(x, load16(bias));
    if (is_float)
        _mm512_storeu_ps((float *)out + offset, x);
    else
        store16((bf16 *)out + offset, x);
}

/* out [m, n] = x [m, k] @ weight.T + bias; k % 32 == n % 16 == 0.
 *
 * bias: [n], or NULL. out: float32 or bf16.
 */
void linear(const bf16 *x, const struct weight *weight, const bf16 *bias, void *out, int is_float,
            int64_t m, int64_t k, int64_t n)
{
    const int64_t columns = n / ROWS, tiles = k / PAIRS, tile_bytes = TILE * weight->bits / 8;
    /* Many rows are first laid out in tiles, like the weight: they are read for every column. */
    bf16 *const packed =
        m > 2 * ROWS ? aligned_alloc(64, (m + ROWS - 1) / ROWS * ROWS * k * sizeof(bf16)) : NULL;
    const int64_t step = packed ? ROWS : 1, stride = packed ? ROW_BYTES : k * (int)sizeof(bf16);
    #pragma omp parallel
    {
        if (packed) {
            #pragma omp for
            for (int64_t row = 0; row < m; row++)
                for (int64_t i = 0; i < k; i += PAIRS)
                    memcpy(packed + row / ROWS * ROWS * k + i * ROWS + row % ROWS * PAIRS,
                           x + row * k + i, ROW_BYTES);
        }
        bf16 *const room =
            weight->bits < 16 ? aligned_alloc(64, 2 * tiles * TILE * sizeof(bf16)) : NULL;
        float sums[4][ROWS * ROWS] __attribute__((aligned(64)));
        int64_t thread = omp_get_thread_num(), num_threads = omp_get_num_threads();
        int64_t first = columns * thread / num_threads;
        int64_t last = columns * (thread + 1) / num_threads;
        int configured = -1;
        for (int64_t column = first; column < last; column += 2) {
            const int two = column + 1 < last;
            const int64_t left = column * tiles, right = (column + two) * tiles;
            for (int64_t row = 0; row < m; row += 2 * ROWS) {
                const int upper = MIN(m - row, ROWS), lower = MIN(m - row - upper, ROWS);
                if (configured != upper + lower) {
                    configure(upper, lower);
                    configured = upper + lower;
                }
                const bf16 *a = (packed ? packed : x) + row * k, *b = a + upper * k;
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
                for (int64_t i = 0; i < tiles; i++) {
                    if (!row) {
                        const char *ahead = (const char *)weight->values + AHEAD;
                        prefetch(ahead + (left + i) * tile_bytes, tile_bytes);
                        prefetch(ahead + (right + i) * tile_bytes, tile_bytes);
                    }
                    _tile_loadd(4, a + i * PAIRS * step, stride);
                    _tile_loadd(6, tile_of(weight, left + i, room + 2 * i * TILE, row), ROW_BYTES);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_loadd(7, tile_of(weight, right + i, room + (2 * i + 1) * TILE, row),
                                ROW_BYTES);
                    _tile_dpbf16ps(1, 4, 7);
                    if (lower) {
                        _tile_loadd(5, b + i * PAIRS * step, stride);
                        _tile_dpbf16ps(2, 5, 6);
                        _tile_dpbf16ps(3, 5, 7);
                    }
                }
                _tile_stored(0, sums[0], ROW_BYTES);
                _tile_stored(1, sums[1], ROW_BYTES);
                _tile_stored(2, sums[2], ROW_BYTES);
                _tile_stored(3, sums[3], ROW_BYTES);
                for (int side = 0; side <= two; side++) {
                    const int64_t at = (column + side) * ROWS;
                    const bf16 *column_bias = bias ? bias + at : NULL;
                    const __m512 scale = weight->bits == 8
                        ? _mm512_loadu_ps((const float *)weight->scales + at) : _mm512_set1_ps(1);
                    for (int i = 0; i < upper + lower; i++) {
                        const float *sum = sums[2 * (i / ROWS) + side] + i % ROWS * ROWS;
                        store_row(out, is_float, (row + i) * n + at,
                                  _mm512_mul_ps(_mm512_load_ps(sum), scale), column_bias);
                    }
                }
            }
        }
        if (configured >= 0)
            _tile_release();
        free(room);
    }
    free(packed);
}

/* -- norms, activation, rotary embedding -- */

static void norm_row(const bf16 *x, const bf16 *weight, float eps, bf16 *out, int64_t size)
{
    float lanes[16] = {0}, sum = 0; /* a fixed order, for any compiler */
    for (int64_t i = 0; i < size; i += 16)
        for (int j = 0; j < 16; j++)
            lanes[j] += to_float(x[i + j]) * to_float(x[i + j]);
    for (int j = 0; j < 16; j++)
        sum += lanes[j];
    const float scale = 1 / sqrtf(sum / size + eps);
    for (int64_t i = 0; i < size; i++)
        out[i] = to_bf16(to_float(x[i]) * scale * to_float(weight[i]));
}

/* out = rms_norm(x) of each of n rows; size % 16 == 0. With a residual: of residual += x. */
void rms_norm(const bf16 *x, bf16 *residual, const bf16 *weight, float eps, bf16 *out, int64_t n,
              int64_t size)
{
    #pragma omp parallel for if (n >= 8)
    for (int64_t row = 0; row < n; row++) {
        const bf16 *normed = x + row * size;
        if (residual) {
            bf16 *to = residual + row * size;
            for (int64_t i = 0; i < size; i++)
                to[i] = to_bf16(to_float(to[i]) + to_float(normed[i]));
            normed = to;
        }
        norm_row(normed, weight, eps, out + row * size, size);
    }
}

/* gate_up [n, 2 * size] -> out [n, size]; size % 16 == 0. */
void silu_and_mul(const bf16 *gate_up, bf16 *out, int64_t n, int64_t size)
{
    #pragma omp parallel for if (n >= 8)
    for (int64_t row = 0; row < n; row++) {
        const bf16 *gate = gate_up + row * 2 * size, *up = gate + size;
        for (int64_t i = 0; i < size; i += 16) {
            const __m512 g = load16(gate + i), one = _mm512_set1_ps(1);
            const __m512 e = exp16(_mm512_sub_ps(_mm512_setzero_ps(), g));
            const __m512 silu = _mm512_div_ps(g, _mm512_add_ps(one, e));
            store16(out + row * size + i, _mm512_mul_ps(silu, load16(up + i)));
        }
    }
}

static void rotate(const bf16 *x, const float *cos, const float *sin, bf16 *out, int64_t dim)
{
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        const float a = to_float(x[i]), b = to_float(x[half + i]);
        out[i] = to_bf16(a * cos[i] - b * sin[i]);
        out[half + i] = to_bf16(b * cos[i] + a * sin[i]);
    }
}

/* qkv [n, num_heads + 2 * num_kv_heads, dim] -> q [n, num_heads, dim], rotated; keys, rotated, and
 * values to their slots (-1: nowhere) in the cache [num_slots, num_kv_heads, dim].
 *
 * cos, sin: [n, dim / 2]. q_norm, k_norm: weights [dim] of a norm before the rotation, or NULL.
 */
void rope_and_cache(const bf16 *qkv, const float *cos, const float *sin, const int64_t *slots,
                    const bf16 *q_norm, const bf16 *k_norm, float eps, bf16 *q, bf16 *keys,
                    bf16 *values, int64_t n, int64_t num_heads, int64_t num_kv_heads, int64_t dim)
{
    #pragma omp parallel for if (n >= 8)
    for (int64_t token = 0; token < n; token++) {
        const bf16 *x = qkv + token * (num_heads + 2 * num_kv_heads) * dim;
        const int64_t slot = slots[token];
        bf16 normed[MAX_DIM];
        for (int64_t head = 0; head < num_heads + num_kv_heads; head++, x += dim) {
            const int is_key = head >= num_heads;
            const bf16 *in = x;
            if (q_norm) {
                norm_row(x, is_key ? k_norm : q_norm, eps, normed, dim);
                in = normed;
            }
            if (is_key && slot < 0)
                continue;
            bf16 *to = is_key ? keys + (slot * num_kv_heads + head - num_heads) * dim
                              : q + (token * num_heads + head) * dim;
            rotate(in, cos + token * dim / 2, sin + token * dim / 2, to, dim);
        }
        if (slot >= 0)
            memcpy(values + slot * num_kv_heads * dim, x, num_kv_heads * dim * sizeof(bf16));
    }
}

/* -- attention -- */

struct attention {
    const bf16 *q;           /* [num_tokens, num_heads, dim] */
    const bf16 *keys;        /* [num_blocks, block_size, num_kv_heads, dim] */
    const bf16 *values;      /* the same */
    const int32_t *starts;   /* [num_seqs + 1]: of each sequence's queries */
    const int32_t *seq_lens; /* [num_seqs] */
    const int32_t *blocks;   /* [num_seqs, max_blocks] */
    bf16 *out;               /* [num_tokens, num_heads, dim] */
    int64_t num_seqs, max_blocks, block_size, num_heads, num_kv_heads, dim;
    int64_t window; /* 0: none */
    float scale;
};

/* What a task needs: it is all of one thread's own. */
struct scratch {
    float *scores; /* [keys, 16]: of each key with the queries of a task */
    bf16 *probs;   /* [keys / 32, 16, 32] */
    int64_t size;  /* keys there is room for */
};

static void make_room(struct scratch *scratch, int64_t size)
{
    if (scratch->size >= size)
        return;
    free(scratch->scores);
    free(scratch->probs);
    scratch->size = 2 * size;
    scratch->scores = aligned_alloc(64, scratch->size * ROW_BYTES);
    scratch->probs = aligned_alloc(64, scratch->size * ROWS * sizeof(bf16));
    if (!scratch->scores || !scratch->probs)
        abort();
}

/* Rows that are not beside each other are hard to foresee for the processor. */
static void prefetch_tile(const bf16 *row, int64_t stride)
{
    for (int i = 0; i < ROWS; i++)
        _mm_prefetch(row + i * stride, _MM_HINT_T0);
}

static const bf16 *at_key(const struct attention *s, const bf16 *cache, int64_t seq,
                          int64_t kv_head, int64_t key)
{
    const int64_t block = s->blocks[seq * s->max_blocks + key / s->block_size];
    const int64_t slot = block * s->block_size + key % s->block_size;
    return cache + (slot * s->num_kv_heads + kv_head) * s->dim;
}

/* The lower (at 0) or upper (at 16) halves of two rows of 32 bf16, as 16 pairs. */
static __m512i interleave(__m512i even, __m512i odd, int at)
{
    const __m512i pairs = _mm512_add_epi32(
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
        _mm512_set1_epi32(at));
    const __m512i odds = _mm512_slli_epi32(_mm512_add_epi32(pairs, _mm512_set1_epi32(32)), 16);
    return _mm512_permutex2var_epi16(even, _mm512_or_si512(pairs, odds), odd);
}

/* Attention of `num_queries` tokens of one sequence, from its `first` on, with all the heads that
 * share a KV head: columns of tiles, at most 16.
 *
 * Three passes over the keys the queries see, in steps of 32 from a multiple of 32: scores;
 * exp(score - largest), rounded to bf16; products with the values. A key that one query of the
 * task sees and another does not adds an exact 0 to the latter.
 */
static void attend(const struct attention *s, int64_t seq, int64_t kv_head, int64_t first,
                   int64_t num_queries, struct scratch *scratch)
{
    const int64_t group = s->num_heads / s->num_kv_heads, columns = num_queries * group;
    const int64_t dim = s->dim, token_size = s->num_kv_heads * dim;
    const int64_t seq_len = s->seq_lens[seq];
    const int64_t context = seq_len - (s->starts[seq + 1] - s->starts[seq]) + first;
    const int64_t end = context + num_queries; /* of the keys seen */
    const int64_t begin = s->window && context >= s->window
        ? (context - s->window + 1) / PAIRS * PAIRS : 0;
    const int64_t num_keys = (end - begin + PAIRS - 1) / PAIRS * PAIRS;
    make_room(scratch, num_keys);

    bf16 packed[MAX_DIM / PAIRS][ROWS][ROWS][2] __attribute__((aligned(64))); /* q, transposed */
    memset(packed, 0, dim / PAIRS * sizeof(packed[0]));
    int32_t last_seen[ROWS]; /* by each column; those that are no query's like the first */
    for (int64_t c = 0; c < ROWS; c++) {
        const int64_t query = c < columns ? c / group : 0;
        last_seen[c] = context + query;
        if (c >= columns)
            continue;
        const int64_t token = s->starts[seq] + first + query;
        const bf16 *q = s->q + (token * s->num_heads + kv_head * group + c % group) * dim;
        for (int64_t i = 0; i < dim / 2; i++)
            memcpy(packed[i / ROWS][i % ROWS][c], q + 2 * i, 2 * sizeof(bf16));
    }

    /* Scores. Keys are rows of tiles as they lie in the cache. */
    const __m512i last = _mm512_loadu_si512(last_seen);
    const __m512i window = _mm512_set1_epi32(s->window ? s->window : INT32_MAX);
    __m512 largest = _mm512_set1_ps(NEVER);
    for (int64_t key = begin; key < begin + num_keys; key += ROWS) {
        float *scores = scratch->scores + (key - begin) * ROWS;
        if (key < end) {
            const bf16 *k = at_key(s, s->keys, seq, kv_head, key);
            const bf16 *v = at_key(s, s->values, seq, kv_head, key);
            const int64_t ahead = MIN(key + 2 * ROWS, end - 1);
            const bf16 *next = at_key(s, s->keys, seq, kv_head, ahead / ROWS * ROWS);
            _tile_zero(0);
            for (int64_t i = 0; i < dim; i += PAIRS) {
                prefetch_tile(v + i, token_size);
                prefetch_tile(next + i, token_size);
                _tile_loadd(6, k + i, token_size * sizeof(bf16));
                _tile_loadd(7, packed[i / PAIRS], ROW_BYTES);
                _tile_dpbf16ps(0, 6, 7);
            }
            _tile_stored(0, scores, ROW_BYTES);
        }
        for (int i = 0; i < ROWS; i++) {
            const __m512i behind = _mm512_sub_epi32(last, _mm512_set1_epi32(key + i));
            const __mmask16 seen = _mm512_cmpge_epi32_mask(behind, _mm512_setzero_si512())
                & _mm512_cmplt_epi32_mask(behind, window);
            const __m512 score = _mm512_mask_mul_ps(_mm512_set1_ps(NEVER), seen,
                _mm512_load_ps(scores + i * ROWS), _mm512_set1_ps(s->scale));
            _mm512_store_ps(scores + i * ROWS, score);
            largest = _mm512_max_ps(largest, score);
        }
    }

    /* Probabilities, not yet divided by their sums. */
    const __m512i counting =
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i halves = _mm512_or_si512(counting,
        _mm512_slli_epi32(_mm512_add_epi32(counting, _mm512_set1_epi32(ROWS)), 16));
    __m512 sums = _mm512_setzero_ps();
    for (int64_t step = 0; step < num_keys; step += PAIRS) {
        bf16 pairs[ROWS][ROWS][2] __attribute__((aligned(64)));
        for (int i = 0; i < ROWS; i++) {
            const float *scores = scratch->scores + (step + 2 * i) * ROWS;
            const __m512 even = exp16(_mm512_sub_ps(_mm512_load_ps(scores), largest));
            const __m512 odd = exp16(_mm512_sub_ps(_mm512_load_ps(scores + ROWS), largest));
            sums = _mm512_add_ps(_mm512_add_ps(sums, even), odd);
            const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
            _mm512_store_si512(pairs[i], _mm512_permutexvar_epi16(halves, both));
        }
        for (int64_t c = 0; c < columns; c++)
            for (int i = 0; i < ROWS; i++)
                memcpy(scratch->probs + step * ROWS + c * PAIRS + 2 * i, pairs[i][c], sizeof(pairs[i][c]));
    }

    /* Products with the values. */
    float inverse[ROWS], products[2][ROWS][ROWS] __attribute__((aligned(64)));
    _mm512_storeu_ps(inverse, _mm512_div_ps(_mm512_set1_ps(1), sums));
    bf16 tiles[2][ROWS][PAIRS] __attribute__((aligned(64)));
    for (int64_t i = 0; i < dim; i += PAIRS) {
        const bf16 *v = s->values;
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t step = 0; step < num_keys; step += PAIRS) {
            for (int j = 0; j < ROWS; j++) {
                const int64_t key = begin + step + 2 * j;
                if (j % (ROWS / 2) == 0 && key < end)
                    v = at_key(s, s->values, seq, kv_head, key) + i;
                /* What no query sees may be anything, even NaN. */
                const __m512i even = _mm512_maskz_loadu_epi32(key < end ? -1 : 0, v);
                const __m512i odd =
                    _mm512_maskz_loadu_epi32(key + 1 < end ? -1 : 0, v + token_size);
                v += 2 * token_size;
                _mm512_store_si512(tiles[0][j], interleave(even, odd, 0));
                _mm512_store_si512(tiles[1][j], interleave(even, odd, ROWS));
            }
            _tile_loadd(5, scratch->probs + step * ROWS, ROW_BYTES);
            _tile_loadd(6, tiles[0], ROW_BYTES);
            _tile_dpbf16ps(2, 5, 6);
            _tile_loadd(7, tiles[1], ROW_BYTES);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(2, products[0], ROW_BYTES);
        _tile_stored(3, products[1], ROW_BYTES);
        for (int64_t c = 0; c < columns; c++) {
            const int64_t token = s->starts[seq] + first + c / group;
            bf16 *out = s->out + (token * s->num_heads + kv_head * group + c % group) * dim + i;
            const __m512 factor = _mm512_set1_ps(inverse[c]);
            store16(out, _mm512_mul_ps(_mm512_load_ps(products[0][c]), factor));
            store16(out + ROWS, _mm512_mul_ps(_mm512_load_ps(products[1][c]), factor));
        }
    }
}

/* dim % 32 == block_size % 16 == 0; num_heads / num_kv_heads <= 16. */
void attention(const struct attention *s)
{
    static __thread struct scratch scratch;
    const int64_t group = s->num_heads / s->num_kv_heads, queries = ROWS / group;
    int64_t next = 0;
    #pragma omp parallel
    {
        configure(ROWS, ROWS);
        int64_t task = 0, mine;
        #pragma omp atomic capture
        mine = next++;
        for (int64_t seq = 0; seq < s->num_seqs; seq++) {
            const int64_t query_len = s->starts[seq + 1] - s->starts[seq];
            for (int64_t first = 0; first < query_len; first += queries) {
                for (int64_t kv_head = 0; kv_head < s->num_kv_heads; kv_head++) {
                    if (task++ != mine)
                        continue;
                    attend(s, seq, kv_head, first, MIN(queries, query_len - first), &scratch);
                    #pragma omp atomic capture
                    mine = next++;
                }
            }
        }
        _tile_release();
    }
}

/* -- sampling -- */

/* ln x, for normal x > 0. Within 2 units in the last place. */
static __m512 log16(__m512 x)
{
    const __m512 one = _mm512_set1_ps(1);
    __m512 m = _mm512_getmant_ps(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero);
    __m512 e = _mm512_getexp_ps(x);
    const __mmask16 large = _mm512_cmp_ps_mask(m, _mm512_set1_ps(1.41421356f), _CMP_GT_OQ);
    m = _mm512_mask_mul_ps(m, large, m, _mm512_set1_ps(0.5f));
    e = _mm512_mask_add_ps(e, large, e, one);
    const __m512 r = _mm512_sub_ps(m, one), square = _mm512_mul_ps(r, r);
    __m512 p = _mm512_set1_ps(7.0376836292e-2f); /* Cephes' polynomial */
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(-1.1514610310e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.1676998740e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(-1.2420140846e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.4249322787e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(-1.6668057665e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.0000714765e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(-2.4999993993e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(3.3333331174e-1f));
    p = _mm512_mul_ps(p, _mm512_mul_ps(r, square));
    p = _mm512_fmadd_ps(e, _mm512_set1_ps(-2.12194440e-4f), p);
    p = _mm512_fnmadd_ps(_mm512_set1_ps(0.5f), square, p);
    return _mm512_fmadd_ps(e, _mm512_set1_ps(0.693359375f), _mm512_add_ps(r, p));
}

/* `reference.gumbel` of 16 tokens. */
static __m512 gumbel(__m512i tokens, int64_t key)
{
    __m512i x = _mm512_add_epi32(_mm512_mullo_epi32(tokens, _mm512_set1_epi32(0x9E3779B9)),
                                 _mm512_set1_epi32((int32_t)key));
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
    x = _mm512_mullo_epi32(x, _mm512_set1_epi32(0x7FEB352D));
    x = _mm512_xor_si512(x, _mm512_set1_epi32(key >> 32));
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 15));
    x = _mm512_mullo_epi32(x, _mm512_set1_epi32(0x846CA68B));
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
    x = _mm512_and_si512(x, _mm512_set1_epi32(0x7FFFFFFF));
    const __m512 v = _mm512_mul_ps(_mm512_add_ps(_mm512_cvtepi32_ps(x), _mm512_set1_ps(0.5f)),
                                   _mm512_set1_ps((float)((1 - 0x1p-24) / 0x1p31)));
    /* -log(1 - v), exact for small v as well (Kahan). */
    const __m512 left = _mm512_sub_ps(_mm512_set1_ps(1), v);
    const __m512 taken = _mm512_sub_ps(_mm512_set1_ps(1), left);
    const __mmask16 counts = _mm512_cmp_ps_mask(taken, _mm512_setzero_ps(), _CMP_GT_OQ);
    const __m512 ratio = _mm512_maskz_div_ps(counts, v, taken);
    const __m512 w = _mm512_mask_mul_ps(v, counts, _mm512_sub_ps(_mm512_setzero_ps(), log16(left)),
                                        ratio);
    return _mm512_sub_ps(_mm512_setzero_ps(), log16(w));
}

static __mmask16 within(int64_t i, int64_t size)
{
    return size - i >= 16 ? 0xffff : (1 << (size - i)) - 1;
}

/* The first of the largest x + temperature * noise of those that are at least `threshold`. */
static int64_t draw(const float *x, int64_t size, float threshold, float temperature, int64_t key)
{
    const __m512i counting =
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512 best = _mm512_set1_ps(-INFINITY);
    __m512i where = counting;
    for (int64_t i = 0; i < size; i += 16) {
        __m512 score = _mm512_maskz_loadu_ps(within(i, size), x + i);
        const __mmask16 left = _mm512_mask_cmp_ps_mask(within(i, size), score,
            _mm512_set1_ps(threshold), _CMP_GE_OQ);
        if (!left)
            continue;
        const __m512i tokens = _mm512_add_epi32(counting, _mm512_set1_epi32(i));
        if (temperature > 0)
            score = _mm512_fmadd_ps(gumbel(tokens, key), _mm512_set1_ps(temperature), score);
        const __mmask16 better = _mm512_mask_cmp_ps_mask(left, score, best, _CMP_GT_OQ);
        best = _mm512_mask_mov_ps(best, better, score);
        where = _mm512_mask_mov_epi32(where, better, tokens);
    }
    const __m512 largest = _mm512_set1_ps(_mm512_reduce_max_ps(best));
    const int64_t first = _mm512_mask_reduce_min_epi32(
        _mm512_cmp_ps_mask(best, largest, _CMP_EQ_OQ), where);
    return MIN(first, size - 1);
}

/* The tokens among which a filter's threshold lies. */
struct candidates {
    float *x;
    int64_t n;
    float smallest, largest;
};

/* Those of `from` that are at least `low` and at most `high`, in their order. `to` may be `from`. */
static struct candidates between(const float *from, int64_t n, float low, float high, float *to)
{
    struct candidates kept = {.x = to};
    __m512 smallest = _mm512_set1_ps(INFINITY), largest = _mm512_set1_ps(-INFINITY);
    for (int64_t i = 0; i < n; i += 16) {
        const __m512 x = _mm512_maskz_loadu_ps(within(i, n), from + i);
        __mmask16 keep = _mm512_mask_cmp_ps_mask(within(i, n), x, _mm512_set1_ps(low), _CMP_GE_OQ);
        keep = _mm512_mask_cmp_ps_mask(keep, x, _mm512_set1_ps(high), _CMP_LE_OQ);
        _mm512_mask_compressstoreu_ps(to + kept.n, keep, x);
        kept.n += __builtin_popcount(keep);
        smallest = _mm512_mask_min_ps(smallest, keep, smallest, x);
        largest = _mm512_mask_max_ps(largest, keep, largest, x);
    }
    kept.smallest = _mm512_reduce_min_ps(smallest);
    kept.largest = _mm512_reduce_max_ps(largest);
    return kept;
}

/* How many there are from `low` on; with a temperature, how much they weigh beside `best`. */
static double weigh(const struct candidates *c, float low, float best, float temperature)
{
    int64_t count = 0;
    __m512d first = _mm512_setzero_pd(), last = _mm512_setzero_pd();
    for (int64_t i = 0; i < c->n; i += 16) {
        const __m512 x = _mm512_maskz_loadu_ps(within(i, c->n), c->x + i);
        const __mmask16 counts =
            _mm512_mask_cmp_ps_mask(within(i, c->n), x, _mm512_set1_ps(low), _CMP_GE_OQ);
        count += __builtin_popcount(counts);
        if (!temperature || !counts)
            continue;
        const __m512 weights = _mm512_maskz_mov_ps(counts, exp16(_mm512_div_ps(
            _mm512_sub_ps(x, _mm512_set1_ps(best)), _mm512_set1_ps(temperature))));
        first = _mm512_add_pd(first, _mm512_cvtps_pd(_mm512_castps512_ps256(weights)));
        last = _mm512_add_pd(last, _mm512_cvtps_pd(_mm512_extractf32x8_ps(weights, 1)));
    }
    return temperature ? _mm512_reduce_add_pd(_mm512_add_pd(first, last)) : count;
}

/* The largest x from which on there are so many, or weigh so much: by halves of the range. */
static float cut_off(struct candidates c, double wanted, float best, float temperature)
{
    while (c.n && c.smallest < c.largest) {
        float middle = c.smallest + (c.largest - c.smallest) / 2;
        if (middle <= c.smallest)
            middle = c.largest;
        const double upper = weigh(&c, middle, best, temperature);
        if (upper >= wanted) {
            c = between(c.x, c.n, middle, c.largest, c.x);
        } else {
            wanted -= upper;
            c = between(c.x, c.n, c.smallest, nextafterf(middle, -INFINITY), c.x);
        }
    }
    return c.n ? c.smallest : -INFINITY;
}

struct sampling {
    const float *logits;      /* [n, size] */
    const float *temperature; /* [n]; NULL: all 0 */
    const float *top_p, *min_p;
    const int32_t *top_k;
    const int64_t *keys;
    int64_t *tokens; /* [n]: the result */
    int64_t n, size;
};

/* The least logit that min-p, top-k and top-p leave of row i. room: [2, size]. */
static float threshold_of(const struct sampling *s, int64_t i, float *room)
{
    const float *x = s->logits + i * s->size, temperature = s->temperature[i];
    float threshold = -INFINITY;
    struct candidates all = between(x, s->size, -FLT_MAX, FLT_MAX, room);
    const float best = all.largest;
    if (s->min_p[i] > 0)
        threshold = best + temperature * logf(s->min_p[i]);
    if (s->top_k[i] < s->size) {
        const struct candidates copy =
            between(all.x, all.n, -FLT_MAX, FLT_MAX, room + s->size);
        threshold = fmaxf(threshold, cut_off(copy, s->top_k[i], best, 0));
    }
    if (s->top_p[i] < 1) {
        all = between(all.x, all.n, fmaxf(threshold, -FLT_MAX), FLT_MAX, all.x);
        const double mass = weigh(&all, -FLT_MAX, best, temperature);
        threshold = fmaxf(threshold, cut_off(all, s->top_p[i] * mass, best, temperature));
    }
    return threshold;
}

void sample(const struct sampling *s)
{
    #pragma omp parallel if (s->n > 1)
    {
        float *const room = s->temperature ? malloc(2 * s->size * sizeof(float)) : NULL;
        #pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < s->n; i++) {
            const float *x = s->logits + i * s->size;
            const float temperature = s->temperature ? s->temperature[i] : 0;
            const int filtered = temperature > 0
                && (s->top_k[i] < s->size || s->top_p[i] < 1 || s->min_p[i] > 0);
            const float threshold = filtered ? threshold_of(s, i, room) : -INFINITY;
            s->tokens[i] = draw(x, s->size, threshold, temperature, temperature ? s->keys[i] : 0);
        }
        free(room);
    }
}

/* -- all layers of a model -- */

struct linear {
    struct weight weight;
    const bf16 *bias;
};

struct layer {
    const bf16 *input_norm, *post_attention_norm, *q_norm, *k_norm;
    struct linear qkv, o, gate_up, down;
    bf16 *keys, *values;
};

struct decoder {
    const struct layer *layers;
    const bf16 *norm; /* of the last layer's output */
    bf16 *residual;   /* [n, hidden]: embeddings, overwritten */
    bf16 *x;          /* [n, hidden]: the result */
    bf16 *qkv;        /* [n, num_heads + 2 * num_kv_heads, dim] */
    bf16 *gate_up;    /* [n, 2 * intermediate] */
    bf16 *activated;  /* [n, intermediate] */
    const float *cos, *sin;
    const int64_t *slots;
    int64_t num_layers, n, hidden, intermediate;
    float eps;
    struct attention attention; /* without keys and values */
};

/* What `LlamaModel.forward` does, by the same functions, in one call. */
void decode(const struct decoder *d)
{
    struct attention a = d->attention;
    const int64_t n = d->n, hidden = d->hidden, intermediate = d->intermediate;
    const int64_t q_size = a.num_heads * a.dim, kv_size = a.num_kv_heads * a.dim;
    bf16 *const q = (bf16 *)a.q, *const x = d->x;

    rms_norm(d->residual, NULL, d->layers[0].input_norm, d->eps, x, n, hidden);
    for (int64_t i = 0; i < d->num_layers; i++) {
        const struct layer *l = d->layers + i;
        const bf16 *next_norm = i + 1 < d->num_layers ? l[1].input_norm : d->norm;
        linear(x, &l->qkv.weight, l->qkv.bias, d->qkv, 0, n, hidden, q_size + 2 * kv_size);
        rope_and_cache(d->qkv, d->cos, d->sin, d->slots, l->q_norm, l->k_norm, d->eps, q, l->keys,
                       l->values, n, a.num_heads, a.num_kv_heads, a.dim);
        a.keys = l->keys;
        a.values = l->values;
        attention(&a);
        linear(a.out, &l->o.weight, l->o.bias, x, 0, n, q_size, hidden);
        rms_norm(x, d->residual, l->post_attention_norm, d->eps, x, n, hidden);
        linear(x, &l->gate_up.weight, l->gate_up.bias, d->gate_up, 0, n, hidden, 2 * intermediate);
        silu_and_mul(d->gate_up, d->activated, n, intermediate);
        linear(d->activated, &l->down.weight, l->down.bias, x, 0, n, intermediate, hidden);
        rms_norm(x, d->residual, next_norm, d->eps, x, n, hidden);
    }
}
