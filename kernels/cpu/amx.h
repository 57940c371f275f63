/* For processors with AMX and AVX-512: products by tiles of 16 x 32. Part of `ops.c`. */

enum { AHEAD = 8192 /* bytes: how far ahead a weight is prefetched */ };

/* e^x for x <= 88; 0 instead of a denormal result, which would cost a hundred cycles. Within 2 units
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

/* Ask the operating system for AMX's registers. Returns 0 if it grants them. */
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
        config.rows[i] = rows[i] ? rows[i] : 1; /* 0 rows are not allowed; such a tile is not used */
        config.row_bytes[i] = ROW_BYTES;
    }
    _tile_loadconfig(&config);
}

/* -- linear -- */

/* Tiles are read too rarely for the processor's own prefetcher. */
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

/* scales: 256 times the factors. */
static void unpack_fp8(const uint8_t *tile, const float *scales, bf16 *out)
{
    const __m512i firsts = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    const __m512i lasts = _mm512_add_epi32(firsts, _mm512_set1_epi32(ROWS / 2));
    const __m512 scale = _mm512_load_ps(scales);
    const __m512 first_scale = _mm512_permutexvar_ps(firsts, scale);
    const __m512 last_scale = _mm512_permutexvar_ps(lasts, scale);
    const __m512i signs = _mm512_set1_epi16((int16_t)0x8000), rest = _mm512_set1_epi16(0x3f80);
    for (int i = 0; i < TILE; i += PAIRS) {
        const __m512i number = _mm512_slli_epi16(
            _mm512_cvtepu8_epi16(_mm256_load_si256((const __m256i *)(tile + i))), 8);
        const __m512i half_floats = _mm512_or_si512(
            _mm512_and_si512(number, signs), _mm512_and_si512(_mm512_srli_epi16(number, 1), rest));
        const __m512 first =
            _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(half_floats)), first_scale);
        const __m512 last =
            _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(half_floats, 1)), last_scale);
        _mm512_store_si512(out + i, (__m512i)_mm512_cvtne2ps_pbh(last, first));
    }
}

/* Tile `i` of a weight as bf16: in the weight itself, or unpacked to `room`. */
static const bf16 *tile_of(const struct weight *w, int64_t i, bf16 *room, int is_unpacked)
{
    if (w->form == BF16)
        return (const bf16 *)w->values + i * TILE;
    if (is_unpacked)
        return room;
    if (w->form == INT8)
        unpack8((const int8_t *)w->values + i * TILE, room);
    else if (w->form == INT4)
        unpack4((const uint8_t *)w->values + i * TILE / 2,
                (const uint16_t *)w->scales + i * 2 * ROWS, room);
    else
        unpack_fp8((const uint8_t *)w->values + i * TILE, (const float *)w->scales + i * ROWS,
                   room);
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
    const int64_t columns = n / ROWS, tiles = k / PAIRS;
    const int64_t tile_bytes = TILE * bits_of(weight->form) / 8;
    /* Many rows are first laid out in tiles, like the weight, as each column reads them. */
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
            weight->form != BF16 ? aligned_alloc(64, 2 * tiles * TILE * sizeof(bf16)) : NULL;
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
                    const __m512 scale = weight->form == INT8
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

/* -- activation -- */

/* activation(gate) * up; `up` of NULL: 1. With t(g) = 1.5957691 g + 0.0713548 g^3, g / (1 + e^-t) is
 * GELU's approximation by tanh (Hendrycks & Gimpel, 2016); with t(g) = g it is SiLU. */
static void activate_row(const bf16 *gate, const bf16 *up, bf16 *out, int64_t size, int activation)
{
    for (int64_t i = 0; i < size; i += 16) {
        const __m512 g = load16(gate + i), one = _mm512_set1_ps(1), zero = _mm512_setzero_ps();
        __m512 y;
        if (activation == RELU2) {
            const __m512 positive = _mm512_max_ps(zero, g); /* NaN stays */
            y = _mm512_mul_ps(positive, positive);
        } else {
            const __m512 slope = _mm512_fmadd_ps(_mm512_mul_ps(g, g), _mm512_set1_ps(0.0713548162726f),
                                                 _mm512_set1_ps(1.595769121606f));
            const __m512 t = activation == GELU_TANH ? _mm512_mul_ps(g, slope) : g;
            const __m512 e = exp16(_mm512_min_ps(_mm512_sub_ps(zero, t), _mm512_set1_ps(88)));
            y = _mm512_div_ps(g, _mm512_add_ps(one, e));
        }
        store16(out + i, up ? _mm512_mul_ps(y, load16(up + i)) : y);
    }
}

/* -- attention -- */

static void begin_attention(void)
{
    configure(ROWS, ROWS);
}

static void end_attention(void)
{
    _tile_release();
}

/* cap * tanh(x / cap) */
static __m512 cap16(__m512 x, float cap)
{
    const __m512 doubled = _mm512_mul_ps(x, _mm512_set1_ps(2 / cap));
    const __m512 e = exp16(_mm512_min_ps(doubled, _mm512_set1_ps(88)));
    const __m512 part = _mm512_div_ps(_mm512_set1_ps(2 * cap), _mm512_add_ps(e, _mm512_set1_ps(1)));
    return _mm512_sub_ps(_mm512_set1_ps(cap), part);
}

/* The processor's own prefetcher misses rows that are not adjacent. */
static void prefetch_tile(const bf16 *row, int64_t stride)
{
    for (int i = 0; i < ROWS; i++)
        _mm_prefetch(row + i * stride, _MM_HINT_T0);
}

/* The lower (at = 0) or upper (at = 16) halves of two rows of 32 bf16, as 16 pairs. */
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
 * Three passes over the keys that the queries see, in steps of 32 from a multiple of 32: scores;
 * exp(score - largest), rounded to bf16; products with the values. A key adds an exact 0 to each
 * query of the task that does not see it.
 */
static void attend(const struct attention *s, int64_t seq, int64_t kv_head, int64_t first,
                   int64_t num_queries, struct scratch *scratch)
{
    const int64_t group = s->num_heads / s->num_kv_heads, columns = num_queries * group;
    const int64_t dim = s->dim, token_size = s->num_kv_heads * dim;
    const int64_t seq_len = s->seq_lens[seq];
    const int64_t context = seq_len - (s->starts[seq + 1] - s->starts[seq]) + first;
    const int64_t end = context + num_queries; /* the queries see keys before `end` */
    const int64_t begin = s->window && context >= s->window
        ? (context - s->window + 1) / PAIRS * PAIRS : 0;
    const int64_t num_keys = (end - begin + PAIRS - 1) / PAIRS * PAIRS;
    make_room(scratch, num_keys);

    bf16 packed[MAX_DIM / PAIRS][ROWS][ROWS][2] __attribute__((aligned(64))); /* q, transposed */
    memset(packed, 0, dim / PAIRS * sizeof(packed[0]));
    int32_t last_seen[ROWS]; /* by each column; columns without a query repeat the first one */
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

    /* Scores. The cache's keys are rows of tiles. */
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
            __m512 scaled = _mm512_mul_ps(_mm512_load_ps(scores + i * ROWS),
                                          _mm512_set1_ps(s->scale));
            if (s->soft_cap > 0)
                scaled = cap16(scaled, s->soft_cap);
            const __m512 score = _mm512_mask_mov_ps(_mm512_set1_ps(NEVER), seen, scaled);
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
                memcpy(scratch->probs + step * ROWS + c * PAIRS + 2 * i, pairs[i][c],
                       sizeof(pairs[i][c]));
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
                /* A key that no query sees may be anything, even NaN. */
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
