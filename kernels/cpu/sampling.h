/* Sampling. Part of `ops.c`. */

/* The logits that may be a filter's threshold. */
struct candidates {
    float *x; /* [n] */
    int64_t n;
    float smallest, largest;
};

#ifdef __AMX_BF16__
#include "sampling_avx512.h"
#else
#include "sampling_avx2.h"
#endif

/* The largest x for which the candidates >= x number, or weigh, at least `wanted`: by bisection. */
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
    const float *top_p, *min_p; /* [n] */
    const int32_t *top_k;     /* [n] */
    const int64_t *keys;      /* [n] */
    int64_t *tokens;          /* [n]: the result */
    int64_t n, size;
};

/* The smallest logit that min-p, top-k and top-p keep in row i. room: [2, size]. */
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
