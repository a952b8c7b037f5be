#define _POSIX_C_SOURCE 200809L /* pthread_barrier_t */
/* Threads that share a problem, each with its own rows and units, give the bits of one thread. For the thread
 * sanitizer, and for the first look at the instruction sets, which several threads may take at once. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/memlean.h"

enum { rows = 12, vocab = 70001, threads = 4 };

static float logits[rows * vocab], gradients[2][rows * vocab];
static float logps[2][rows], entropies[2][rows], statistics[2][rows * MEMLEAN_STATISTICS], upstream[rows];
static int64_t chosen[rows];
static const int64_t sizes[1] = {rows}, strides[1] = {vocab};

typedef struct {
    int result; /* 0: one thread's, 1: the threads' */
    int part, parts;
    pthread_barrier_t *barrier;
    memlean_row_state *states;
} share;

static void wait_for_all(const share *s)
{
    if (s->barrier)
        pthread_barrier_wait(s->barrier);
}

static void *work(void *argument)
{
    const share *s = argument;
    const memlean_token_logprob_params p = {
        .dtype = MEMLEAN_F32,
        .logits = logits,
        .rows = rows,
        .vocab = vocab,
        .candidates = 1,
        .vocab_stride = 1,
        .row_dims = 1,
        .row_sizes = sizes,
        .row_strides = strides,
        .index = chosen,
        .index_limit = vocab,
        .logp = logps[s->result],
        .entropy = entropies[s->result],
        .statistics = statistics[s->result],
        .grad_logp = upstream,
        .grad_entropy = upstream,
        .grad_logits = gradients[s->result],
    };
    const int64_t units = rows * memlean_token_logprob_segments(vocab);
    int64_t position;
    wait_for_all(s);
    if (memlean_token_logprob_check(&p, &position) != MEMLEAN_OK || !memlean_isa_active())
        abort();
    if (s->states) {
        memlean_token_logprob_reduce(&p, units * s->part / s->parts, units * (s->part + 1) / s->parts, s->states);
        wait_for_all(s);
        memlean_token_logprob_finish(&p, rows * s->part / s->parts, rows * (s->part + 1) / s->parts, s->states);
    } else {
        memlean_token_logprob_forward(&p, rows * s->part / s->parts, rows * (s->part + 1) / s->parts);
    }
    wait_for_all(s);
    memlean_token_logprob_backward(&p, units * s->part / s->parts, units * (s->part + 1) / s->parts);
    return NULL;
}

int main(void)
{
    int failed = 0;
    for (int i = 0; i < rows * vocab; i++)
        logits[i] = (float)(i * 7919 % 10007) / 1000;
    for (int i = 0; i < rows; i++) {
        chosen[i] = i * 5000;
        upstream[i] = 1 + (float)i;
    }
    for (int split = 0; split < 2; split++) {
        pthread_barrier_t barrier;
        pthread_t started[threads];
        share shares[threads];
        memlean_row_state *states = malloc(sizeof *states * (size_t)(rows * memlean_token_logprob_segments(vocab)));
        if (!states || pthread_barrier_init(&barrier, NULL, threads))
            return 2;
        for (int t = 0; t < threads; t++) {
            shares[t] = (share){1, t, threads, &barrier, split ? states : NULL};
            if (pthread_create(&started[t], NULL, work, &shares[t]))
                return 2;
        }
        for (int t = 0; t < threads; t++)
            pthread_join(started[t], NULL);
        share alone = {0, 0, 1, NULL, NULL}; /* after the threads: they take the first look */
        work(&alone);
        failed |=
            memcmp(logps[0], logps[1], sizeof logps[0]) || memcmp(entropies[0], entropies[1], sizeof entropies[0]);
        failed |= memcmp(statistics[0], statistics[1], sizeof statistics[0]) != 0;
        failed |= memcmp(gradients[0], gradients[1], sizeof gradients[0]) != 0;
        memset(gradients, 0, sizeof gradients);
        memset(logps, 0, sizeof logps);
        pthread_barrier_destroy(&barrier);
        free(states);
    }
    printf("%d threads: %s\n", threads, failed ? "other bits than one thread" : "the bits of one thread");
    return failed;
}
