/* One forward pass of a Llama or GPT-2 model over new rows of several sessions, from embeddings to logits.
 *
 * Python lays out what is new and keeps the caches; this file computes. A row's result depends, to the last
 * bit, on the tokens of its path alone: not on the rows beside it, the sessions in the pass, the number of
 * threads, or where in the cache its ancestors lie. */

#define _GNU_SOURCE
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "attention.h"

enum { QKV, ATTENTION, OUTPUT, UP, DOWN, HEAD, OTHER, NUM_PARTS };

typedef struct {
    const float *norm1, *norm1_bias, *norm2, *norm2_bias; /* [hidden]; a bias: layer norm, NULL: RMS norm */
    const float *query_norm, *key_norm;                   /* [head_dim] or NULL */
    linear qkv, output, up, down;
} layer;

typedef struct {
    int32_t num_layers, hidden, inner, gated;
    float epsilon;
    heads heads;
    const float *cosines, *sines; /* [max_length][head_dim], NULL without rotary positions */
    const float *norm, *norm_bias;
    const layer *layers;
    linear head;
} model;

typedef struct {
    const model *model;
    int32_t num_segments, num_rows, num_wanted, num_threads;
    const segment *segments;
    float *hidden;         /* [num_rows][hidden]: embeddings in, last hidden states out */
    const int32_t *wanted; /* rows that need logits */
    float *logits;         /* [num_wanted][vocabulary] */
    double *seconds;       /* [NUM_PARTS], added to */
} pass;

typedef struct {
    const pass *p;
    float *normed, *qkv, *attended, *inner, *picked;
    rows_in rows; /* for 8-bit layers, what they read */
    scratch *scratch;
    int *piece_segment; /* attention's pieces begin here, one entry a segment and one more */
    int queries_at_once;
    double clock;
} state;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void book(state *st, int thread, int part) {
    if (thread) return;
    double time = now();
    st->p->seconds[part] += time - st->clock;
    st->clock = time;
}

/* Over `count` values that lie together: x / rms(x), or (x - mean) / deviation, times the weight. */
static void norm_row(const float *x, const float *weight, const float *bias, float epsilon, int count, float *out) {
    float mean = 0.0f, square = 0.0f;
    vec sum = {0}, squares = {0};
    int whole = count / VL * VL;
    if (bias) {
        for (int i = 0; i < whole; i += VL) sum += load(x + i);
        mean = sum_lanes(sum);
        for (int i = whole; i < count; i++) mean += x[i];
        mean /= (float)count;
    }
    for (int i = 0; i < whole; i += VL) {
        vec centred = load(x + i) - splat(mean);
        squares = fma_v(centred, centred, squares);
    }
    square = sum_lanes(squares);
    for (int i = whole; i < count; i++) square = fmaf(x[i] - mean, x[i] - mean, square);
    float factor = 1.0f / sqrtf(square / (float)count + epsilon);
    for (int i = 0; i < count; i++) out[i] = (x[i] - mean) * factor * weight[i] + (bias ? bias[i] : 0.0f);
}

static void norm_rows(state *st, team *t, const float *weight, const float *bias, float *out) {
    const pass *p = st->p;
    long hidden = p->model->hidden;
    int begin, end;
    while (take(t, p->num_rows, 1, &begin, &end))
        norm_row(p->hidden + begin * hidden, weight, bias, p->model->epsilon, hidden, out + begin * hidden);
    meet(t);
}

/* One phase over rows [num_rows][num_inputs] that lie together. */
static void apply(state *st, team *t, const linear *l, const float *x, int num_rows, int then, float *out,
                  long out_stride) {
    rows_in in = st->rows;
    in.values = x, in.stride = l->num_inputs;
    quantize(t, l, &in, num_rows);
    run_linear(t, l, &in, num_rows, then, out, out_stride);
}

static const segment *segment_of(const pass *p, int row) {
    const segment *s = p->segments;
    while (row >= s->first_row + s->num_new) s++;
    return s;
}

static void rotate(float *x, const float *cosines, const float *sines, int dim) {
    int half = dim / 2;
    for (int i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cosines[i] - b * sines[i];
        x[i + half] = b * cosines[i + half] + a * sines[i + half];
    }
}

/* Positions into queries and keys, keys and values into the cache. */
static void place_rows(state *st, team *t, int index) {
    const pass *p = st->p;
    const model *m = p->model;
    const layer *l = &m->layers[index];
    const heads *h = &m->heads;
    int dim = h->head_dim, width = (h->num_heads + 2 * h->num_kv_heads) * dim, begin, end;
    while (take(t, p->num_rows, 1, &begin, &end)) {
        const segment *s = segment_of(p, begin);
        int row = s->length - s->num_new + begin - s->first_row;
        float *line = st->qkv + (long)begin * width;
        for (int i = 0; i < h->num_heads + h->num_kv_heads; i++) {
            float *x = line + i * dim;
            const float *weight = i < h->num_heads ? l->query_norm : l->key_norm;
            if (weight) norm_row(x, weight, NULL, m->epsilon, dim, x);
            if (m->cosines) {
                long at = (long)position(s, row) * dim;
                rotate(x, m->cosines + at, m->sines + at, dim);
            }
            if (i < h->num_heads)
                for (int d = 0; d < dim; d++) x[d] *= h->scale;
        }
        for (int i = 0; i < h->num_kv_heads; i++) {
            const float *key_in = line + (h->num_heads + i) * dim, *value_in = key_in + h->num_kv_heads * dim;
            float *key = key_of(s, h, index, i, row);
            for (int d = 0; d < dim; d++) key[d * PANEL] = key_in[d];
            memcpy(value_of(s, h, index, i, row), value_in, dim * sizeof(float));
        }
    }
    meet(t);
}

static void attention(state *st, team *t, int thread, int index) {
    const pass *p = st->p;
    const heads *h = &p->model->heads;
    int width = (h->num_heads + 2 * h->num_kv_heads) * h->head_dim, shared = h->num_heads / h->num_kv_heads;
    int begin, end;
    while (take(t, st->piece_segment[p->num_segments], 1, &begin, &end)) {
        int i = 0;
        while (begin >= st->piece_segment[i + 1]) i++;
        const segment *s = &p->segments[i];
        int piece = begin - st->piece_segment[i], total = s->num_new * shared;
        int pieces = (total + st->queries_at_once - 1) / st->queries_at_once;
        int kv_head = piece / pieces, part = piece % pieces;
        int first = (long)part * total / pieces, last = (long)(part + 1) * total / pieces;
        attend(s, h, index, kv_head, first, last - first, st->qkv + (long)s->first_row * width, width,
               st->attended + (long)s->first_row * h->num_heads * h->head_dim, &st->scratch[thread]);
    }
    meet(t);
}

static void run_pass(void *task, team *t, int thread) {
    state *st = task;
    const pass *p = st->p;
    const model *m = p->model;
    int n = p->num_rows;
    for (int i = 0; i < m->num_layers; i++) {
        const layer *l = &m->layers[i];
        norm_rows(st, t, l->norm1, l->norm1_bias, st->normed);
        book(st, thread, OTHER);
        apply(st, t, &l->qkv, st->normed, n, STORE, st->qkv, l->qkv.num_outputs);
        book(st, thread, QKV);
        place_rows(st, t, i);
        book(st, thread, OTHER);
        attention(st, t, thread, i);
        book(st, thread, ATTENTION);
        apply(st, t, &l->output, st->attended, n, ADD, p->hidden, m->hidden);
        book(st, thread, OUTPUT);
        norm_rows(st, t, l->norm2, l->norm2_bias, st->normed);
        book(st, thread, OTHER);
        apply(st, t, &l->up, st->normed, n, m->gated ? GATED_SILU : GELU_TANH, st->inner, m->inner);
        book(st, thread, UP);
        apply(st, t, &l->down, st->inner, n, ADD, p->hidden, m->hidden);
        book(st, thread, DOWN);
    }
    norm_rows(st, t, m->norm, m->norm_bias, p->hidden);
    int begin, end;
    while (take(t, p->num_wanted, 1, &begin, &end))
        memcpy(st->picked + (long)begin * m->hidden, p->hidden + (long)p->wanted[begin] * m->hidden,
               m->hidden * sizeof(float));
    meet(t);
    book(st, thread, OTHER);
    apply(st, t, &m->head, st->picked, p->num_wanted, STORE, p->logits, m->head.num_outputs);
    book(st, thread, HEAD);
}

/* Memory that one pass after another works in. It grows to what the largest needed. */
static struct {
    char *memory;
    size_t size, used;
} arena;

static void *carve(size_t bytes) {
    void *result = arena.memory ? arena.memory + arena.used : NULL;
    arena.used += (bytes + 63) / 64 * 64;
    return result;
}

static void lay_out(state *st, int num_threads, scratch *scratches) {
    const pass *p = st->p;
    const model *m = p->model;
    const heads *h = &m->heads;
    int longest = 0, newest = 0;
    long queries = 0;
    for (int i = 0; i < p->num_segments; i++) {
        longest = p->segments[i].length > longest ? p->segments[i].length : longest;
        newest = p->segments[i].num_new > newest ? p->segments[i].num_new : newest;
        queries += (long)p->segments[i].num_new * h->num_heads;
    }
    long per_thread = queries / (4 * num_threads);
    st->queries_at_once = per_thread < 1 ? 1 : per_thread > MAX_TILE ? MAX_TILE : per_thread;

    long n = p->num_rows, floats = sizeof(float);
    long widest = m->hidden > m->inner ? m->hidden : m->inner;
    widest = h->num_heads * h->head_dim > widest ? h->num_heads * h->head_dim : widest;
    long groups = groups_of(widest);
    arena.used = 0;
    st->normed = carve(n * m->hidden * floats);
    st->qkv = carve(n * (h->num_heads + 2 * h->num_kv_heads) * h->head_dim * floats);
    st->attended = carve(n * h->num_heads * h->head_dim * floats);
    st->inner = carve(n * m->inner * floats);
    st->picked = carve((long)p->num_wanted * m->hidden * floats);
    st->rows.shorts = carve(n * groups * GROUP * sizeof(int16_t));
    st->rows.scales = carve(n * groups * floats);
    st->piece_segment = carve((p->num_segments + 1) * sizeof(int));
    long padded = (longest + PANEL - 1) / PANEL * PANEL;
    for (int i = 0; i < num_threads; i++) {
        scratches[i].floats = carve(MAX_TILE * (h->head_dim + padded) * floats);
        scratches[i].ints = carve((long)MAX_TILE * newest * sizeof(int));
    }
    st->scratch = scratches;
}

static void cut_attention(state *st) {
    const pass *p = st->p;
    const heads *h = &p->model->heads;
    st->piece_segment[0] = 0;
    for (int i = 0; i < p->num_segments; i++) {
        int total = p->segments[i].num_new * (h->num_heads / h->num_kv_heads);
        int pieces = (total + st->queries_at_once - 1) / st->queries_at_once;
        st->piece_segment[i + 1] = st->piece_segment[i] + pieces * h->num_kv_heads;
    }
}

/* Runs a pass. Returns 0, or 1 if there is no memory for it. */
int stagespec_forward(const pass *p) {
    int num_threads = p->num_threads < MAX_THREADS ? p->num_threads : MAX_THREADS;
    scratch scratches[MAX_THREADS];
    state st = {.p = p};
    enter();
    do {
        lay_out(&st, num_threads, scratches);
        if (arena.memory && arena.used <= arena.size) break;
        free(arena.memory);
        arena.size = arena.used;
        arena.memory = aligned_alloc(64, arena.size);
    } while (arena.memory);
    if (!arena.memory) {
        arena.size = 0;
        leave();
        return 1;
    }
    cut_attention(&st);
    st.clock = now();
    run_team(run_pass, &st, num_threads);
    leave();
    return 0;
}

int stagespec_panel(void) { return PANEL; }
int stagespec_lanes(void) { return VL; }
int stagespec_group(void) { return GROUP; }

/* Bytes of a packed weight. */
int64_t stagespec_packed_bytes(int format, int num_outputs, int num_inputs) {
    int64_t panels = panels_of(num_outputs);
    if (format == INT8) return panels * groups_of(num_inputs) * (int64_t)sizeof(block8);
    return panels * num_inputs * PANEL * (format == FLOAT16 ? 2 : 4);
}

/* Asks for large pages before the memory is touched: a pass walks through all of it. */
static void use_large_pages(void *memory, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    uintptr_t page = sysconf(_SC_PAGESIZE), begin = ((uintptr_t)memory + page - 1) / page * page;
    uintptr_t end = ((uintptr_t)memory + bytes) / page * page;
    if (begin < end) madvise((void *)begin, end - begin, MADV_HUGEPAGE); /* if it can't, small ones do */
#else
    (void)memory, (void)bytes;
#endif
}

/* Packs a weight [num_outputs][num_inputs]: float, half as uint16_t, or int8_t with a scale for each output and
 * group of inputs, [num_outputs][groups]. What a panel has too much is 0. */
void stagespec_pack(int format, int num_outputs, int num_inputs, const void *weight, const float *scales,
                    void *packed) {
    int groups = groups_of(num_inputs);
    int64_t bytes = stagespec_packed_bytes(format, num_outputs, num_inputs);
    use_large_pages(packed, bytes);
    memset(packed, 0, bytes);
    for (int o = 0; o < num_outputs; o++) {
        long panel = o / PANEL, lane = o % PANEL, row = (long)o * num_inputs;
        if (format == INT8) {
            block8 *blocks = (block8 *)packed + panel * groups;
            for (int g = 0; g < groups; g++) {
                blocks[g].scales[lane] = scales[(long)o * groups + g];
                for (int i = 0; i < GROUP; i++) {
                    int at = g * GROUP + i;
                    if (at < num_inputs) blocks[g].bytes[i / 2][lane][i % 2] = ((const int8_t *)weight)[row + at];
                }
            }
        } else
            for (int k = 0; k < num_inputs; k++) {
                long at = (panel * num_inputs + k) * PANEL + lane;
                if (format == FLOAT16) ((uint16_t *)packed)[at] = ((const uint16_t *)weight)[row + k];
                else ((float *)packed)[at] = ((const float *)weight)[row + k];
            }
    }
}
