/* The parts of `sampling.h` that depend on the processor, with AVX2. */

/* ln x, for normal x > 0. Within 2 units in the last place. */
INLINE __m256 log8(__m256 x)
{
    const __m256 one = _mm256_set1_ps(1);
    const __m256i bits = _mm256_castps_si256(x);
    __m256 m = _mm256_castsi256_ps(
        _mm256_or_si256(_mm256_and_si256(bits, _mm256_set1_epi32(0x7fffff)),
                        _mm256_castps_si256(one)));
    __m256 e = _mm256_cvtepi32_ps(
        _mm256_sub_epi32(_mm256_srli_epi32(bits, 23), _mm256_set1_epi32(127)));
    const __m256 large = _mm256_cmp_ps(m, _mm256_set1_ps(1.41421356f), _CMP_GT_OQ);
    m = _mm256_blendv_ps(m, _mm256_mul_ps(m, _mm256_set1_ps(0.5f)), large);
    e = _mm256_add_ps(e, _mm256_and_ps(large, one));
    const __m256 r = _mm256_sub_ps(m, one), square = _mm256_mul_ps(r, r);
    __m256 p = _mm256_set1_ps(7.0376836292e-2f); /* Cephes' polynomial */
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(-1.1514610310e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.1676998740e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(-1.2420140846e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.4249322787e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(-1.6668057665e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(2.0000714765e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(-2.4999993993e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(3.3333331174e-1f));
    p = _mm256_mul_ps(p, _mm256_mul_ps(r, square));
    p = _mm256_fmadd_ps(e, _mm256_set1_ps(-2.12194440e-4f), p);
    p = _mm256_fnmadd_ps(_mm256_set1_ps(0.5f), square, p);
    return _mm256_fmadd_ps(e, _mm256_set1_ps(0.693359375f), _mm256_add_ps(r, p));
}

/* `reference.gumbel` of 8 tokens. */
INLINE __m256 gumbel(__m256i tokens, int64_t key)
{
    const __m256 zero = _mm256_setzero_ps(), one = _mm256_set1_ps(1);
    __m256i x = _mm256_add_epi32(_mm256_mullo_epi32(tokens, _mm256_set1_epi32(0x9E3779B9)),
                                 _mm256_set1_epi32((int32_t)key));
    x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
    x = _mm256_mullo_epi32(x, _mm256_set1_epi32(0x7FEB352D));
    x = _mm256_xor_si256(x, _mm256_set1_epi32(key >> 32));
    x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 15));
    x = _mm256_mullo_epi32(x, _mm256_set1_epi32(0x846CA68B));
    x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
    x = _mm256_and_si256(x, _mm256_set1_epi32(0x7FFFFFFF));
    const __m256 v = _mm256_mul_ps(_mm256_add_ps(_mm256_cvtepi32_ps(x), _mm256_set1_ps(0.5f)),
                                   _mm256_set1_ps((float)((1 - 0x1p-24) / 0x1p31)));
    /* -log(1 - v), exact for small v as well (Kahan). */
    const __m256 left = _mm256_sub_ps(one, v), taken = _mm256_sub_ps(one, left);
    const __m256 w = _mm256_mul_ps(_mm256_sub_ps(zero, log8(left)), _mm256_div_ps(v, taken));
    const __m256 counts = _mm256_cmp_ps(taken, zero, _CMP_GT_OQ);
    return _mm256_sub_ps(zero, log8(_mm256_blendv_ps(v, w, counts)));
}

/* x[0:8]; NaN from `left` on, for which every comparison is false. */
INLINE __m256 load_some(const float *x, int64_t left)
{
    if (left >= WIDTH)
        return _mm256_loadu_ps(x);
    const __m256i inside = _mm256_cmpgt_epi32(_mm256_set1_epi32(left),
                                              _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0));
    return _mm256_blendv_ps(_mm256_set1_ps(NAN), _mm256_maskload_ps(x, inside),
                            _mm256_castsi256_ps(inside));
}

/* The first index of the largest x + temperature * noise over x >= threshold. */
static int64_t draw(const float *x, int64_t size, float threshold, float temperature, int64_t key)
{
    const __m256i counting = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    __m256 best = _mm256_set1_ps(-INFINITY);
    __m256i where = counting;
    for (int64_t i = 0; i < size; i += WIDTH) {
        __m256 score = load_some(x + i, size - i);
        const __m256 left = _mm256_cmp_ps(score, _mm256_set1_ps(threshold), _CMP_GE_OQ);
        if (!_mm256_movemask_ps(left))
            continue;
        const __m256i tokens = _mm256_add_epi32(counting, _mm256_set1_epi32(i));
        if (temperature > 0)
            score = _mm256_fmadd_ps(gumbel(tokens, key), _mm256_set1_ps(temperature), score);
        const __m256 better = _mm256_and_ps(left, _mm256_cmp_ps(score, best, _CMP_GT_OQ));
        best = _mm256_blendv_ps(best, score, better);
        where = _mm256_blendv_epi8(where, tokens, _mm256_castps_si256(better));
    }
    float values[WIDTH];
    int32_t tokens[WIDTH];
    _mm256_storeu_ps(values, best);
    _mm256_storeu_si256((__m256i *)tokens, where);
    int first = 0;
    for (int i = 1; i < WIDTH; i++)
        if (values[i] > values[first] || (values[i] == values[first] && tokens[i] < tokens[first]))
            first = i;
    return MIN(tokens[first], size - 1);
}

/* The numbers of `from` in [low, high], in order. `to` may be `from`. */
static struct candidates between(const float *from, int64_t n, float low, float high, float *to)
{
    struct candidates kept = {.x = to, .smallest = INFINITY, .largest = -INFINITY};
    __m256 smallest = _mm256_set1_ps(INFINITY), largest = _mm256_set1_ps(-INFINITY);
    for (int64_t i = 0; i < n; i += WIDTH) {
        const __m256 x = load_some(from + i, n - i);
        const __m256 keep = _mm256_and_ps(_mm256_cmp_ps(x, _mm256_set1_ps(low), _CMP_GE_OQ),
                                          _mm256_cmp_ps(x, _mm256_set1_ps(high), _CMP_LE_OQ));
        smallest = _mm256_min_ps(_mm256_blendv_ps(smallest, x, keep), smallest);
        largest = _mm256_max_ps(_mm256_blendv_ps(largest, x, keep), largest);
        float values[WIDTH];
        _mm256_storeu_ps(values, x);
        for (int bits = _mm256_movemask_ps(keep); bits; bits &= bits - 1)
            to[kept.n++] = values[__builtin_ctz(bits)];
    }
    float least[WIDTH], most[WIDTH];
    _mm256_storeu_ps(least, smallest);
    _mm256_storeu_ps(most, largest);
    for (int i = 0; i < WIDTH; i++) {
        kept.smallest = fminf(kept.smallest, least[i]);
        kept.largest = fmaxf(kept.largest, most[i]);
    }
    return kept;
}

/* The number of candidates >= low; with a temperature, their weight relative to `best`. */
static double weigh(const struct candidates *c, float low, float best, float temperature)
{
    int64_t count = 0;
    __m256d lower = _mm256_setzero_pd(), upper = _mm256_setzero_pd();
    for (int64_t i = 0; i < c->n; i += WIDTH) {
        const __m256 x = load_some(c->x + i, c->n - i);
        const __m256 counts = _mm256_cmp_ps(x, _mm256_set1_ps(low), _CMP_GE_OQ);
        const int bits = _mm256_movemask_ps(counts);
        count += __builtin_popcount(bits);
        if (!temperature || !bits)
            continue;
        const __m256 weights = _mm256_and_ps(counts, exp8(_mm256_div_ps(
            _mm256_sub_ps(x, _mm256_set1_ps(best)), _mm256_set1_ps(temperature))));
        lower = _mm256_add_pd(lower, _mm256_cvtps_pd(_mm256_castps256_ps128(weights)));
        upper = _mm256_add_pd(upper, _mm256_cvtps_pd(_mm256_extractf128_ps(weights, 1)));
    }
    double weights[WIDTH / 2], sum = 0;
    _mm256_storeu_pd(weights, _mm256_add_pd(lower, upper));
    for (int i = 0; i < WIDTH / 2; i++)
        sum += weights[i];
    return temperature ? sum : count;
}
