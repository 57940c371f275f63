/* The operations of a model on CPUs, for bfloat16. `build.py` compiles this, `operations.py` and
 * `decoder.py` call it; `kernels/__init__.py` describes each operation. Products, attention and all
 * else that depends on the processor are in `amx.h` or `avx2.h`, sampling in `sampling.h`.
 *
 * A row's result does not depend on the rows that are computed with it: the order of every sum
 * depends only on the row itself (He et al., "Defeating nondeterminism in LLM inference", 2025).
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
    ROWS = 16,           /* rows of a tile */
    ROW_BYTES = 64,      /* bytes of a tile's row: 16 float32, or 16 pairs of bf16 */
    PAIRS = 32,          /* bf16 in a tile's row */
    TILE = ROWS * PAIRS, /* bf16 in a tile */
    MAX_DIM = 256,       /* the largest size of a head */
};

enum activation { SILU, GELU_TANH, RELU2 };

#define NEVER (-1e30f) /* the score of a masked key */
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

/* -- what depends on the processor -- */

enum form { BF16, INT8, INT4, FP8 };

/* [n, k], laid out as [n / 16, k / 2, 16, 2]: a tile is 32 of k for 16 of n.
 * BF16: no scales.
 * INT8: scales [n] float.
 * INT4: a tile's row is 16 bytes; the lower halves are its first 16 values, the upper halves its
 *       last 16. scales [n / 16, k / 32, 2, 16] fp16: a factor, then a summand.
 * FP8:  e4m3. scales [n / 16, k / 32, 16] float: 256 times the factor, as an e4m3
 *       number is read as fp16, whose exponents are 8 less.
 */
struct weight {
    const void *values, *scales;
    int64_t form;
};

static inline int bits_of(int form)
{
    return form == BF16 ? 16 : form == INT4 ? 4 : 8;
}

struct attention {
    const bf16 *q;           /* [num_tokens, num_heads, dim] */
    const bf16 *keys;        /* [num_blocks, block_size, num_kv_heads, dim] */
    const bf16 *values;      /* [num_blocks, block_size, num_kv_heads, dim] */
    const int32_t *starts;   /* [num_seqs + 1]: where each sequence's queries start */
    const int32_t *seq_lens; /* [num_seqs] */
    const int32_t *blocks;   /* [num_seqs, max_blocks] */
    bf16 *out;               /* [num_tokens, num_heads, dim] */
    int64_t num_seqs, max_blocks, block_size, num_heads, num_kv_heads, dim;
    int64_t window; /* 0: none */
    float scale;
    float soft_cap; /* of the scaled scores; 0: none */
};

/* A thread's own memory for its current task. */
struct scratch {
    float *scores; /* [size, 16]: of each key with a task's queries */
    bf16 *probs;   /* [size / 32, 16, 32] */
    int64_t size;  /* in keys */
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


static const bf16 *at_key(const struct attention *s, const bf16 *cache, int64_t seq,
                          int64_t kv_head, int64_t key)
{
    const int64_t block = s->blocks[seq * s->max_blocks + key / s->block_size];
    const int64_t slot = block * s->block_size + key % s->block_size;
    return cache + (slot * s->num_kv_heads + kv_head) * s->dim;
}

#ifdef __AMX_BF16__
#include "amx.h"
#else
#include "avx2.h"
#endif
#include "sampling.h"

/* -- norms, activation, rotary embedding -- */

static void norm_row(const bf16 *x, const float *weight, float eps, bf16 *out, int64_t size)
{
    float lanes[16] = {0}, sum = 0; /* the same order of sums with every compiler */
    for (int64_t i = 0; i < size; i += 16)
        for (int j = 0; j < 16; j++)
            lanes[j] += to_float(x[i + j]) * to_float(x[i + j]);
    for (int j = 0; j < 16; j++)
        sum += lanes[j];
    const float scale = 1 / sqrtf(sum / size + eps);
    for (int64_t i = 0; i < size; i++)
        out[i] = to_bf16(to_float(x[i]) * scale * weight[i]);
}

/* residual += out_norm(x) * factor, then out = norm(residual). A norm of NULL is none. `out` may be x.
 *
 * size % 16 == 0.
 */
static void add_row(const bf16 *x, bf16 *residual, const float *out_norm, float factor,
                    const float *norm, float eps, bf16 *out, int64_t size)
{
    if (out_norm) {
        norm_row(x, out_norm, eps, out, size);
        x = out;
    }
    for (int64_t i = 0; i < size; i++) {
        const float added = factor == 1 ? to_float(x[i]) : to_float(to_bf16(to_float(x[i]) * factor));
        residual[i] = to_bf16(to_float(residual[i]) + added);
    }
    if (norm)
        norm_row(residual, norm, eps, out, size);
    else
        memcpy(out, residual, size * sizeof(bf16));
}

/* out = rms_norm(x) of each of n rows; with a residual, residual += x and out = rms_norm(residual).
 *
 * size % 16 == 0.
 */
void rms_norm(const bf16 *x, bf16 *residual, const float *weight, float eps, bf16 *out, int64_t n,
              int64_t size)
{
    #pragma omp parallel for if (n >= 8)
    for (int64_t at = 0; at < n * size; at += size) {
        if (residual)
            add_row(x + at, residual + at, NULL, 1, weight, eps, out + at, size);
        else
            norm_row(x + at, weight, eps, out + at, size);
    }
}

/* x [n, 2 * size], or [n, size] if not gated -> out [n, size]; size % 16 == 0. */
void activate(const bf16 *x, bf16 *out, int64_t n, int64_t size, int64_t activation, int64_t gated)
{
    #pragma omp parallel for if (n >= 8)
    for (int64_t row = 0; row < n; row++) {
        const bf16 *gate = x + row * (gated ? 2 : 1) * size;
        activate_row(gate, gated ? gate + size : NULL, out + row * size, size, activation);
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

/* qkv [n, num_heads + 2 * num_kv_heads, dim] -> rotated queries q [n, num_heads, dim]; rotated keys
 * and values go to their slots in the cache [num_slots, num_kv_heads, dim]; slot -1: not written.
 *
 * cos, sin: [n, dim / 2]. q_norm, k_norm: weights [dim] of a norm before the rotation, or NULL; or,
 * if `whole`, [num_heads * dim] and [num_kv_heads * dim] of a norm of all heads, which changes qkv.
 */
void rope_and_cache(bf16 *qkv, const float *cos, const float *sin, const int64_t *slots,
                    const float *q_norm, const float *k_norm, int64_t whole, float eps, bf16 *q,
                    bf16 *keys, bf16 *values, int64_t n, int64_t num_heads, int64_t num_kv_heads,
                    int64_t dim)
{
    #pragma omp parallel for if (n >= 8)
    for (int64_t token = 0; token < n; token++) {
        bf16 *x = qkv + token * (num_heads + 2 * num_kv_heads) * dim;
        const int64_t slot = slots[token];
        bf16 normed[MAX_DIM];
        if (q_norm && whole) {
            bf16 *k = x + num_heads * dim;
            norm_row(x, q_norm, eps, x, num_heads * dim);
            norm_row(k, k_norm, eps, k, num_kv_heads * dim);
        }
        for (int64_t head = 0; head < num_heads + num_kv_heads; head++, x += dim) {
            const int is_key = head >= num_heads;
            const bf16 *in = x;
            if (q_norm && !whole) {
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

/* dim % 32 == block_size % 16 == 0; num_heads / num_kv_heads <= 16. */
void attention(const struct attention *s)
{
    static __thread struct scratch scratch;
    const int64_t group = s->num_heads / s->num_kv_heads, queries = ROWS / group;
    int64_t next = 0;
    #pragma omp parallel
    {
        begin_attention();
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
        end_attention();
    }
}

/* -- all layers of a model -- */

struct linear {
    struct weight weight;
    const bf16 *bias;
};

struct layer {
    const float *attention_norm, *attention_out_norm, *mlp_norm, *mlp_out_norm; /* NULL: none */
    const float *q_norm, *k_norm;
    struct linear qkv, o, gate_up, down;
    bf16 *keys, *values;
    int64_t window, rope; /* which cos and sin */
};

struct decoder {
    const struct layer *layers;
    const float *norm; /* [hidden]: the weight of the norm after the last layer */
    bf16 *residual;    /* [n, hidden]: embeddings, overwritten */
    bf16 *x;           /* [n, hidden]: the result */
    bf16 *qkv;         /* [n, num_heads + 2 * num_kv_heads, dim] */
    bf16 *gate_up;     /* [n, 2 * intermediate]; [n, intermediate] if not gated */
    bf16 *activated;   /* [n, intermediate] */
    const float *cos, *sin; /* [num_ropes, n, dim / 2] */
    const int64_t *slots;
    int64_t num_layers, n, hidden, intermediate, activation, gated, whole_norm;
    float eps, multiplier;      /* of what a block adds */
    struct attention attention; /* each layer sets its own keys, values and window */
};

/* residual += out_norm(x) * multiplier, then x = norm(residual). */
static void add(const struct decoder *d, const float *out_norm, const float *norm)
{
    #pragma omp parallel for if (d->n >= 8)
    for (int64_t row = 0; row < d->n; row++) {
        bf16 *x = d->x + row * d->hidden;
        add_row(x, d->residual + row * d->hidden, out_norm, d->multiplier, norm, d->eps, x,
                d->hidden);
    }
}

/* `DecoderModel.forward` in one call, with the same functions. */
void decode(const struct decoder *d)
{
    struct attention a = d->attention;
    const int64_t n = d->n, hidden = d->hidden, intermediate = d->intermediate;
    const int64_t q_size = a.num_heads * a.dim, kv_size = a.num_kv_heads * a.dim;
    bf16 *const q = (bf16 *)a.q, *const x = d->x;

    if (d->layers[0].attention_norm)
        rms_norm(d->residual, NULL, d->layers[0].attention_norm, d->eps, x, n, hidden);
    else
        memcpy(x, d->residual, n * hidden * sizeof(bf16));
    for (int64_t i = 0; i < d->num_layers; i++) {
        const struct layer *l = d->layers + i;
        const float *next_norm = i + 1 < d->num_layers ? l[1].attention_norm : d->norm;
        const int64_t angles = l->rope * n * a.dim / 2;
        linear(x, &l->qkv.weight, l->qkv.bias, d->qkv, 0, n, hidden, q_size + 2 * kv_size);
        rope_and_cache(d->qkv, d->cos + angles, d->sin + angles, d->slots, l->q_norm, l->k_norm,
                       d->whole_norm, d->eps, q, l->keys, l->values, n, a.num_heads, a.num_kv_heads,
                       a.dim);
        a.keys = l->keys;
        a.values = l->values;
        a.window = l->window;
        attention(&a);
        linear(a.out, &l->o.weight, l->o.bias, x, 0, n, q_size, hidden);
        add(d, l->attention_out_norm, l->mlp_norm);
        linear(x, &l->gate_up.weight, l->gate_up.bias, d->gate_up, 0, n, hidden,
               (d->gated ? 2 : 1) * intermediate);
        activate(d->gate_up, d->activated, n, intermediate, d->activation, d->gated);
        linear(d->activated, &l->down.weight, l->down.bias, x, 0, n, intermediate, hidden);
        add(d, l->mlp_out_norm, next_norm);
    }
}
