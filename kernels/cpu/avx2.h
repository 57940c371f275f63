/* For processors with AVX2 and no AMX: products by fused multiply-adds in float32. Part of `ops.c`.
 *
 * 16 numbers are two registers of 8 here, the lower half first.
 */

#define INLINE static inline __attribute__((always_inline))

enum {
    WIDTH = 8,           /* float32 in a register */
    FEW = 4,             /* rows, or rows x columns / 16; each has two registers of sums */
    AT_ONCE = 6,         /* rows, if the weight is float32 and needs fewer registers */
    ROWS_IN_CACHE = 96,
    DEPTH = 192,         /* of a weight as float32 in the fastest cache */
    ROWS_AHEAD = 16,     /* of tiles: how far ahead they are prefetched if reading is the limit */
    KEYS_AT_ONCE = 4,
    KEYS_AHEAD = 16,     /* how far ahead keys are prefetched while scores are computed */
    QUERIES_AT_ONCE = 5,
};

/* e^x: 0 instead of a denormal result, infinite from 88.4 on. Within 2 units in the last place. */
INLINE __m256 exp8(__m256 x)
{
    const __m256 lowest = _mm256_set1_ps(-87);
    const __m256 normal = _mm256_cmp_ps(x, lowest, _CMP_GE_OQ);
    x = _mm256_max_ps(x, lowest);
    x = _mm256_min_ps(x, _mm256_set1_ps(89));
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)),
                                     _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 p = _mm256_set1_ps(1.9875691500e-4f); /* Cephes' polynomial */
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.3981999507e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3334519073e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1665795894e-2f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666665459e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.0000001201e-1f));
    p = _mm256_fmadd_ps(_mm256_mul_ps(p, r), r, _mm256_add_ps(r, _mm256_set1_ps(1)));
    const __m256i exponent = _mm256_slli_epi32(
        _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_and_ps(normal, _mm256_mul_ps(p, _mm256_castsi256_ps(exponent)));
}

INLINE __m256 load8(const bf16 *x)
{
    const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}

/* Rounded to bf16, to nearest, ties to even, in the upper halves; the lower halves are undefined. */
INLINE __m256i rounded(__m256 x)
{
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
}

INLINE void store8(bf16 *out, __m256 x)
{
    const __m256i number = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_ORD_Q));
    __m256i bits = _mm256_blendv_epi8(_mm256_set1_epi32(0x7fc00000), rounded(x), number);
    bits = _mm256_srli_epi32(bits, 16);
    bits = _mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits), 0x08);
    _mm_storeu_si128((__m128i *)out, _mm256_castsi256_si128(bits));
}

/* -- linear -- */

/* A row of a weight's tile as float32: the first and the second of each of its 16 pairs. */
struct pairs {
    __m256 of[2][2];
};

INLINE struct pairs read16(const bf16 *row)
{
    struct pairs w;
    for (int half = 0; half < 2; half++) {
        const __m256i both = _mm256_load_si256((const __m256i *)row + half);
        w.of[0][half] = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
        w.of[1][half] = _mm256_castsi256_ps(
            _mm256_and_si256(both, _mm256_set1_epi32((int32_t)0xffff0000)));
    }
    return w;
}

INLINE struct pairs read8(const int8_t *row)
{
    struct pairs w;
    for (int half = 0; half < 2; half++) {
        const __m256i both = _mm256_cvtepi16_epi32(_mm_load_si128((const __m128i *)row + half));
        w.of[0][half] =
            _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(both, 24), 24));
        w.of[1][half] = _mm256_cvtepi32_ps(_mm256_srai_epi32(both, 8));
    }
    return w;
}

/* scales: two registers of scales, two of offsets. */
INLINE struct pairs read4(const uint8_t *row, const __m256 scales[4])
{
    const __m256i four = _mm256_cvtepu16_epi32(_mm_load_si128((const __m128i *)row));
    struct pairs w;
    for (int half = 0; half < 2; half++) {
        for (int i = 0; i < 2; i++) {
            const __m256i value = _mm256_and_si256(
                _mm256_srli_epi32(four, 8 * i + 4 * half), _mm256_set1_epi32(15));
            const __m256 exact =
                _mm256_fmadd_ps(_mm256_cvtepi32_ps(value), scales[half], scales[2 + half]);
            w.of[i][half] = _mm256_castsi256_ps(
                _mm256_and_si256(rounded(exact), _mm256_set1_epi32((int32_t)0xffff0000)));
        }
    }
    return w;
}

/* scales: two registers, 256 times the factors. */
INLINE struct pairs read_fp8(const uint8_t *row, const float *scales)
{
    const __m256i both = _mm256_load_si256((const __m256i *)row);
    const __m256i signs = _mm256_set1_epi16((int16_t)0x8000), rest = _mm256_set1_epi16(0x3f80);
    struct pairs w;
    for (int i = 0; i < 2; i++) {
        const __m256i number = i ? both : _mm256_slli_epi16(both, 8);
        const __m256i half_floats = _mm256_or_si256(
            _mm256_and_si256(number, signs), _mm256_and_si256(_mm256_srli_epi16(number, 1), rest));
        const __m128i halves[2] = {_mm256_castsi256_si128(half_floats),
                                   _mm256_extracti128_si256(half_floats, 1)};
        for (int half = 0; half < 2; half++) {
            const __m256 exact = _mm256_mul_ps(_mm256_cvtph_ps(halves[half]),
                                               _mm256_load_ps(scales + half * WIDTH));
            w.of[i][half] = _mm256_castsi256_ps(
                _mm256_and_si256(rounded(exact), _mm256_set1_epi32((int32_t)0xffff0000)));
        }
    }
    return w;
}

INLINE const char *row_of(const struct weight *weight, int form, int64_t row)
{
    return (const char *)weight->values + row * ROW_BYTES * bits_of(form) / 16;
}

/* Row `row` of all rows of the tiles. `form` is known at compile time. */
INLINE struct pairs read_row(const struct weight *weight, int form, int64_t row)
{
    const char *values = row_of(weight, form, row);
    if (form == BF16)
        return read16((const bf16 *)values);
    if (form == INT8)
        return read8((const int8_t *)values);
    if (form == FP8)
        return read_fp8((const uint8_t *)values,
                        (const float *)weight->scales + row / ROWS * ROWS);
    const uint16_t *scale = (const uint16_t *)weight->scales + row / ROWS * 2 * ROWS;
    __m256 scales[4];
    for (int i = 0; i < 4; i++)
        scales[i] = _mm256_cvtph_ps(_mm_load_si128((const __m128i *)scale + i));
    return read4((const uint8_t *)values, scales);
}

/* sums [num_columns, num_rows, 16]: the products of a few rows of x [num_rows, k] with
 * num_columns * 16 columns of the weight, from 16 * column on.
 *
 * `form`, `num_rows` and `num_columns` are known at compile time. Here and in `multiply_many` every
 * sum is in the order of k, whatever else is computed with it.
 */
INLINE void multiply_few(const float *x, const struct weight *weight, int form, int num_rows,
                         int num_columns, int64_t column, int64_t k, float *sums)
{
    __m256 own[FEW][2]; /* in registers, as to the compiler `sums` might overlap x */
    for (int i = 0; i < num_columns * num_rows; i++)
        own[i][0] = own[i][1] = _mm256_setzero_ps();
    for (int64_t tile = 0; tile < k / PAIRS; tile++) {
        for (int j = 0; j < ROWS; j++) {
            for (int c = 0; c < num_columns; c++) {
                const int64_t row = (column + c) * (k / 2) + tile * ROWS + j;
                const struct pairs w = read_row(weight, form, row);
                if (form == BF16)
                    _mm_prefetch(row_of(weight, form, row + ROWS_AHEAD), _MM_HINT_T0);
                for (int i = 0; i < 2; i++) {
                    for (int r = 0; r < num_rows; r++) {
                        const __m256 a = _mm256_broadcast_ss(x + r * k + tile * PAIRS + 2 * j + i);
                        __m256 *sum = own[c * num_rows + r];
                        sum[0] = _mm256_fmadd_ps(a, w.of[i][0], sum[0]);
                        sum[1] = _mm256_fmadd_ps(a, w.of[i][1], sum[1]);
                    }
                }
            }
        }
    }
    memcpy(sums, own, num_columns * num_rows * sizeof(own[0]));
}

/* sums [num_rows, 16] += x [num_rows, k] @ panel [depth, 16], of x's first `depth` columns. */
INLINE void add_products(const float *x, const float *panel, int num_rows, int64_t depth, int64_t k,
                         float *sums)
{
    __m256 own[AT_ONCE][2]; /* in registers, see `multiply_few` */
    for (int r = 0; r < num_rows; r++) {
        own[r][0] = _mm256_load_ps(sums + r * ROWS);
        own[r][1] = _mm256_load_ps(sums + r * ROWS + WIDTH);
    }
    for (int64_t i = 0; i < depth; i++, panel += ROWS) {
        const __m256 lower = _mm256_load_ps(panel), upper = _mm256_load_ps(panel + WIDTH);
        for (int r = 0; r < num_rows; r++) {
            const __m256 a = _mm256_broadcast_ss(x + r * k + i);
            own[r][0] = _mm256_fmadd_ps(a, lower, own[r][0]);
            own[r][1] = _mm256_fmadd_ps(a, upper, own[r][1]);
        }
    }
    for (int r = 0; r < num_rows; r++) {
        _mm256_store_ps(sums + r * ROWS, own[r][0]);
        _mm256_store_ps(sums + r * ROWS + WIDTH, own[r][1]);
    }
}

INLINE void fill_panel_from(const struct weight *weight, int form, int64_t row, int64_t depth,
                            float panel[][ROWS])
{
    for (const int64_t end = row + depth / 2; row < end; row += ROWS) {
        for (int j = 0; j < ROWS; j++) { /* of a tile, whose scales are read once */
            const struct pairs w = read_row(weight, form, row + j);
            for (int i = 0; i < 2; i++, panel++) {
                _mm256_store_ps(panel[0], w.of[i][0]);
                _mm256_store_ps(panel[0] + WIDTH, w.of[i][1]);
            }
        }
    }
}

/* panel [depth, 16]: a weight's numbers from `row` of all rows of the tiles on, in float32.
 *
 * Not inlined: its constants would take the registers that sums need.
 */
static __attribute__((noinline)) void fill_panel(const struct weight *weight, int64_t row,
                                                 int64_t depth, float panel[][ROWS])
{
    switch (weight->form) {
    case BF16: fill_panel_from(weight, BF16, row, depth, panel); break;
    case INT8: fill_panel_from(weight, INT8, row, depth, panel); break;
    case INT4: fill_panel_from(weight, INT4, row, depth, panel); break;
    default: fill_panel_from(weight, FP8, row, depth, panel);
    }
}

/* sums [m, 16]: the products of rows of x [m, k] with 16 of the weight's columns, which are converted
 * to float32 once for all rows.
 */
INLINE void multiply_many(const float *x, const struct weight *weight, int form, int64_t m,
                          int64_t column, int64_t k, float *sums)
{
    float panel[DEPTH][ROWS] __attribute__((aligned(64)));
    memset(sums, 0, m * ROWS * sizeof(float));
    for (int64_t begin = 0, depth; begin < k; begin += depth) {
        depth = MIN(DEPTH, k - begin);
        fill_panel(weight, (column * k + begin) / 2, depth, panel);
        const char *next = row_of(weight, form, (column * k + begin + depth) / 2);
        for (int64_t row = 0, rows; row < m; row += rows) {
            const int64_t groups = (m - row + AT_ONCE - 1) / AT_ONCE; /* of similar sizes */
            rows = (m - row + groups - 1) / groups;
            /* of the next panel, divided among the groups */
            const int64_t lines = depth * bits_of(form) / 32;
            for (int64_t line = row * lines / m; line < (row + rows) * lines / m; line++)
                _mm_prefetch(next + line * 64, _MM_HINT_T1);
            const float *from = x + row * k + begin;
            float *to = sums + row * ROWS;
            switch (rows) {
            case 1: add_products(from, panel[0], 1, depth, k, to); break;
            case 2: add_products(from, panel[0], 2, depth, k, to); break;
            case 3: add_products(from, panel[0], 3, depth, k, to); break;
            case 4: add_products(from, panel[0], 4, depth, k, to); break;
            case 5: add_products(from, panel[0], 5, depth, k, to); break;
            default: add_products(from, panel[0], AT_ONCE, depth, k, to);
            }
        }
    }
}

/* sums [columns, m, 16]: the products of x with 16 * columns of the weight, from `column` on.
 *
 * Returns `columns`, at most max_columns.
 */
INLINE int64_t multiply_form(const float *x, const struct weight *weight, int form, int64_t m,
                             int64_t column, int64_t max_columns, int64_t k, float *sums)
{
    if (m == 1 && max_columns >= 4) {
        multiply_few(x, weight, form, 1, 4, column, k, sums);
        return 4;
    }
    if (m == 2 && max_columns >= 2) {
        multiply_few(x, weight, form, 2, 2, column, k, sums);
        return 2;
    }
    if (m > (form == BF16 ? 3 * FEW : FEW)) { /* one conversion to float32 is then less work */
        multiply_many(x, weight, form, m, column, k, sums);
        return 1;
    }
    for (int64_t row = 0; row < m; row += FEW) {
        const float *from = x + row * k;
        float *to = sums + row * ROWS;
        switch (m - row) {
        case 1: multiply_few(from, weight, form, 1, 1, column, k, to); break;
        case 2: multiply_few(from, weight, form, 2, 1, column, k, to); break;
        case 3: multiply_few(from, weight, form, 3, 1, column, k, to); break;
        default: multiply_few(from, weight, form, FEW, 1, column, k, to);
        }
    }
    return 1;
}

static int64_t multiply(const float *x, const struct weight *weight, int64_t m, int64_t column,
                        int64_t max_columns, int64_t k, float *sums)
{
    switch (weight->form) {
    case BF16: return multiply_form(x, weight, BF16, m, column, max_columns, k, sums);
    case INT8: return multiply_form(x, weight, INT8, m, column, max_columns, k, sums);
    case INT4: return multiply_form(x, weight, INT4, m, column, max_columns, k, sums);
    default: return multiply_form(x, weight, FP8, m, column, max_columns, k, sums);
    }
}

/* out [m, n] = x [m, k] @ weight.T + bias; k % 32 == n % 16 == 0.
 *
 * bias: [n], or NULL. out: float32 or bf16.
 */
void linear(const bf16 *x, const struct weight *weight, const bf16 *bias, void *out, int is_float,
            int64_t m, int64_t k, int64_t n)
{
    const int64_t columns = n / ROWS;
    float *const floats = aligned_alloc(64, m * k * sizeof(float));
    #pragma omp parallel
    {
        #pragma omp for
        for (int64_t row = 0; row < m; row++)
            for (int64_t i = 0; i < k; i += WIDTH)
                _mm256_store_ps(floats + row * k + i, load8(x + row * k + i));
        const int64_t thread = omp_get_thread_num(), num_threads = omp_get_num_threads();
        const int64_t last = columns * (thread + 1) / num_threads;
        float sums[ROWS_IN_CACHE * ROWS] __attribute__((aligned(64)));
        for (int64_t begin = 0; begin < m; begin += ROWS_IN_CACHE) {
            const int64_t rows = MIN(ROWS_IN_CACHE, m - begin);
            int64_t column = columns * thread / num_threads;
            while (column < last) {
                const int64_t end = column + multiply(floats + begin * k, weight, rows, column,
                                                      last - column, k, sums);
                for (const float *from = sums; column < end; column++) {
                    for (int64_t row = begin; row < begin + rows; row++) {
                        for (int64_t at = column * ROWS; at < (column + 1) * ROWS; at += WIDTH) {
                            __m256 sum = _mm256_load_ps(from);
                            from += WIDTH;
                            if (weight->form == INT8)
                                sum = _mm256_mul_ps(
                                    sum, _mm256_loadu_ps((const float *)weight->scales + at));
                            if (bias)
                                sum = _mm256_add_ps(sum, load8(bias + at));
                            if (is_float)
                                _mm256_storeu_ps((float *)out + row * n + at, sum);
                            else
                                store8((bf16 *)out + row * n + at, sum);
                        }
                    }
                }
            }
        }
    }
    free(floats);
}

/* -- activation -- */

/* activation(gate) * up; `up` of NULL: 1. With t(g) = 1.5957691 g + 0.0713548 g^3, g / (1 + e^-t) is
 * GELU's approximation by tanh (Hendrycks & Gimpel, 2016); with t(g) = g it is SiLU. */
static void activate_row(const bf16 *gate, const bf16 *up, bf16 *out, int64_t size, int activation)
{
    for (int64_t i = 0; i < size; i += WIDTH) {
        const __m256 g = load8(gate + i), one = _mm256_set1_ps(1), zero = _mm256_setzero_ps();
        __m256 y;
        if (activation == RELU2) {
            const __m256 positive = _mm256_max_ps(zero, g); /* NaN stays */
            y = _mm256_mul_ps(positive, positive);
        } else {
            const __m256 slope = _mm256_fmadd_ps(_mm256_mul_ps(g, g), _mm256_set1_ps(0.0713548162726f),
                                                 _mm256_set1_ps(1.595769121606f));
            const __m256 t = activation == GELU_TANH ? _mm256_mul_ps(g, slope) : g;
            y = _mm256_div_ps(g, _mm256_add_ps(one, exp8(_mm256_sub_ps(zero, t))));
        }
        store8(out + i, up ? _mm256_mul_ps(y, load8(up + i)) : y);
    }
}

/* -- attention -- */

static void begin_attention(void) {}

static void end_attention(void) {}

INLINE void fetch(const bf16 *keys, int64_t token_size, int64_t dim)
{
    for (int j = 0; j < KEYS_AT_ONCE; j++)
        for (int64_t i = 0; i < dim; i += PAIRS)
            _mm_prefetch((const char *)(keys + j * token_size + i), _MM_HINT_T0);
}

/* cap * tanh(x / cap) */
INLINE __m256 cap8(__m256 x, float cap)
{
    const __m256 e = exp8(_mm256_mul_ps(x, _mm256_set1_ps(2 / cap)));
    const __m256 part = _mm256_div_ps(_mm256_set1_ps(2 * cap), _mm256_add_ps(e, _mm256_set1_ps(1)));
    return _mm256_sub_ps(_mm256_set1_ps(cap), part);
}

/* Scores of 4 keys from `k` on with `halves` x 8 columns of queries, [dim, 16]. */
INLINE void score(const float *queries, const bf16 *k, int64_t token_size, int64_t dim, int halves,
                  float scale, float *scores)
{
    float keys[KEYS_AT_ONCE][MAX_DIM] __attribute__((aligned(32)));
    for (int j = 0; j < KEYS_AT_ONCE; j++)
        for (int64_t i = 0; i < dim; i += WIDTH)
            _mm256_store_ps(keys[j] + i, load8(k + j * token_size + i));
    __m256 sums[KEYS_AT_ONCE][2];
    for (int j = 0; j < KEYS_AT_ONCE; j++)
        sums[j][0] = sums[j][1] = _mm256_setzero_ps();
    for (int64_t i = 0; i < dim; i++) {
        for (int half = 0; half < halves; half++) {
            const __m256 q = _mm256_load_ps(queries + i * ROWS + half * WIDTH);
            for (int j = 0; j < KEYS_AT_ONCE; j++)
                sums[j][half] =
                    _mm256_fmadd_ps(_mm256_broadcast_ss(keys[j] + i), q, sums[j][half]);
        }
    }
    for (int j = 0; j < KEYS_AT_ONCE; j++)
        for (int half = 0; half < halves; half++)
            _mm256_store_ps(scores + j * ROWS + half * WIDTH,
                            _mm256_mul_ps(sums[j][half], _mm256_set1_ps(scale)));
}

/* sums += 16 numbers of the values' rows, weighted with the probabilities of some columns. */
INLINE void add_values(const bf16 *v, int64_t token_size, const float *probs, int64_t num_keys,
                       int num_columns, __m256 sums[QUERIES_AT_ONCE][2])
{
    __m256 own[QUERIES_AT_ONCE][2]; /* in registers, see `multiply_few` */
    for (int c = 0; c < num_columns; c++)
        for (int half = 0; half < 2; half++)
            own[c][half] = sums[c][half];
    for (int64_t key = 0; key < num_keys; key++, v += token_size, probs += ROWS) {
        const __m256 lower = load8(v), upper = load8(v + WIDTH);
        for (int c = 0; c < num_columns; c++) {
            const __m256 p = _mm256_broadcast_ss(probs + c);
            own[c][0] = _mm256_fmadd_ps(p, lower, own[c][0]);
            own[c][1] = _mm256_fmadd_ps(p, upper, own[c][1]);
        }
    }
    for (int c = 0; c < num_columns; c++)
        for (int half = 0; half < 2; half++)
            sums[c][half] = own[c][half];
}

static void add_values_any(const bf16 *v, int64_t token_size, const float *probs, int64_t num_keys,
                           int num_columns, __m256 sums[QUERIES_AT_ONCE][2])
{
    switch (num_columns) {
    case 1: add_values(v, token_size, probs, num_keys, 1, sums); break;
    case 2: add_values(v, token_size, probs, num_keys, 2, sums); break;
    case 3: add_values(v, token_size, probs, num_keys, 3, sums); break;
    case 4: add_values(v, token_size, probs, num_keys, 4, sums); break;
    default: add_values(v, token_size, probs, num_keys, QUERIES_AT_ONCE, sums);
    }
}

/* Attention of `num_queries` tokens of one sequence, from its `first` on, with all the heads that
 * share a KV head: at most 16 columns.
 *
 * Three passes over the keys that the queries see: scores; exp(score - largest); products with the
 * values. A key adds an exact 0 to each query of the task that does not see it.
 */
static void attend(const struct attention *s, int64_t seq, int64_t kv_head, int64_t first,
                   int64_t num_queries, struct scratch *scratch)
{
    const int64_t group = s->num_heads / s->num_kv_heads, columns = num_queries * group;
    const int64_t dim = s->dim, token_size = s->num_kv_heads * dim;
    const int64_t seq_len = s->seq_lens[seq];
    const int64_t context = seq_len - (s->starts[seq + 1] - s->starts[seq]) + first;
    const int64_t end = context + num_queries; /* the queries see keys before `end` */
    const int64_t seen = s->window && context >= s->window ? context - s->window + 1 : 0;
    const int64_t begin = seen / KEYS_AT_ONCE * KEYS_AT_ONCE; /* KEYS_AT_ONCE keys never cross a block's end */
    const int halves = columns > WIDTH ? 2 : 1;
    make_room(scratch, end - begin + KEYS_AT_ONCE);

    float queries[MAX_DIM][ROWS] __attribute__((aligned(32)));
    memset(queries, 0, dim * sizeof(queries[0]));
    int32_t last_seen[ROWS]; /* by each column; columns without a query repeat the first one */
    for (int64_t c = 0; c < ROWS; c++) {
        const int64_t query = c < columns ? c / group : 0;
        last_seen[c] = context + query;
        if (c >= columns)
            continue;
        const int64_t token = s->starts[seq] + first + query;
        const bf16 *q = s->q + (token * s->num_heads + kv_head * group + c % group) * dim;
        for (int64_t i = 0; i < dim; i++)
            queries[i][c] = to_float(q[i]);
    }

    /* Scores. */
    const __m256i window = _mm256_set1_epi32(s->window ? s->window : INT32_MAX);
    __m256 largest[2] = {_mm256_set1_ps(NEVER), _mm256_set1_ps(NEVER)};
    for (int64_t key = begin; key < end; key += KEYS_AT_ONCE) {
        float *scores = scratch->scores + (key - begin) * ROWS;
        const bf16 *k = at_key(s, s->keys, seq, kv_head, key);
        fetch(k + (s->values - s->keys), token_size, dim);
        if (key + KEYS_AHEAD < end)
            fetch(at_key(s, s->keys, seq, kv_head, key + KEYS_AHEAD), token_size, dim);
        if (halves == 1)
            score(queries[0], k, token_size, dim, 1, s->scale, scores);
        else
            score(queries[0], k, token_size, dim, 2, s->scale, scores);
        for (int i = 0; i < KEYS_AT_ONCE * halves; i++) {
            const int half = i % halves, j = i / halves;
            const __m256i behind = _mm256_sub_epi32(
                _mm256_loadu_si256((const __m256i *)last_seen + half), _mm256_set1_epi32(key + j));
            const __m256i sees = _mm256_andnot_si256(
                _mm256_cmpgt_epi32(_mm256_setzero_si256(), behind),
                _mm256_cmpgt_epi32(window, behind));
            float *at = scores + j * ROWS + half * WIDTH;
            __m256 scaled = _mm256_load_ps(at);
            if (s->soft_cap > 0)
                scaled = cap8(scaled, s->soft_cap);
            const __m256 masked = _mm256_blendv_ps(_mm256_set1_ps(NEVER), scaled,
                                                   _mm256_castsi256_ps(sees));
            _mm256_store_ps(at, masked);
            largest[half] = _mm256_max_ps(largest[half], masked);
        }
    }

    /* Probabilities, not yet divided by their sums. */
    float inverse[ROWS];
    for (int half = 0; half < halves; half++) {
        __m256 sum = _mm256_setzero_ps();
        for (int64_t key = begin; key < end; key++) {
            float *at = scratch->scores + (key - begin) * ROWS + half * WIDTH;
            const __m256 p = exp8(_mm256_sub_ps(_mm256_load_ps(at), largest[half]));
            sum = _mm256_add_ps(sum, p);
            _mm256_store_ps(at, p);
        }
        _mm256_storeu_ps(inverse + half * WIDTH, _mm256_div_ps(_mm256_set1_ps(1), sum));
    }

    /* Products with the values, 16 of `dim` at a time. */
    for (int64_t i = 0; i < dim; i += ROWS) {
        for (int64_t c = 0; c < columns; c += QUERIES_AT_ONCE) {
            const int num_columns = MIN(QUERIES_AT_ONCE, columns - c);
            __m256 sums[QUERIES_AT_ONCE][2];
            for (int j = 0; j < QUERIES_AT_ONCE; j++)
                sums[j][0] = sums[j][1] = _mm256_setzero_ps();
            for (int64_t key = seen, next; key < end; key = next) {
                next = MIN((key / s->block_size + 1) * s->block_size, end);
                add_values_any(at_key(s, s->values, seq, kv_head, key) + i, token_size,
                               scratch->scores + (key - begin) * ROWS + c, next - key, num_columns,
                               sums);
            }
            for (int j = 0; j < num_columns; j++) {
                const int64_t token = s->starts[seq] + first + (c + j) / group;
                const int64_t head = kv_head * group + (c + j) % group;
                bf16 *out = s->out + (token * s->num_heads + head) * dim + i;
                const __m256 factor = _mm256_set1_ps(inverse[c + j]);
                store8(out, _mm256_mul_ps(sums[j][0], factor));
                store8(out + WIDTH, _mm256_mul_ps(sums[j][1], factor));
            }
        }
    }
}
