/* The parts of `sampling.h` that depend on the processor, with AVX-512. */

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

/* The first index of the largest x + temperature * noise over x >= threshold. */
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

/* The numbers of `from` in [low, high], in order. `to` may be `from`. */
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

/* The number of candidates >= low; with a temperature, their weight relative to `best`. */
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
