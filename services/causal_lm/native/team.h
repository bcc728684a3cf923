/* The threads of one pass. They share each phase's work by taking pieces, so that one that the system has put
 * aside holds up no more than its piece, and meet at a barrier between phases. A thread that waits long sleeps,
 * which leaves its processor to the one it waits for. Between passes all sleep. */
#pragma once

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define MAX_THREADS 256
#define SPINS 1000 /* some 20 microseconds: longer than a thread is late if nothing else runs */

typedef struct {
    int size;
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_int generation;
    atomic_int sleepers;
    _Alignas(64) atomic_int next; /* first piece of the phase that nobody has taken */
} team;

static void sleep_while(team *t, int generation) {
#if defined(__linux__)
    atomic_fetch_add(&t->sleepers, 1);
    syscall(SYS_futex, &t->generation, FUTEX_WAIT_PRIVATE, generation, NULL, NULL, 0);
    atomic_fetch_sub(&t->sleepers, 1);
#else
    (void)t, (void)generation;
    sched_yield();
#endif
}

static void wake_all(team *t) {
#if defined(__linux__)
    if (atomic_load(&t->sleepers)) syscall(SYS_futex, &t->generation, FUTEX_WAKE_PRIVATE, MAX_THREADS, NULL, NULL, 0);
#else
    (void)t;
#endif
}

static void meet(team *t) {
    int generation = atomic_load(&t->generation);
    if (atomic_fetch_add(&t->arrived, 1) == t->size - 1) {
        atomic_store(&t->arrived, 0);
        atomic_store(&t->next, 0);
        atomic_store(&t->generation, generation + 1);
        wake_all(t);
        return;
    }
    for (int spins = 0; atomic_load(&t->generation) == generation; spins++) {
        if (spins > SPINS) sleep_while(t, generation);
#if defined(__x86_64__)
        else __builtin_ia32_pause();
#endif
    }
}

/* Takes the next pieces of a phase; *end is behind the last one. False: there are no more. */
static int take(team *t, int num_pieces, int at_once, int *begin, int *end) {
    *begin = atomic_fetch_add(&t->next, at_once);
    *end = *begin + at_once < num_pieces ? *begin + at_once : num_pieces;
    return *begin < num_pieces;
}

typedef void (*work)(void *task, team *t, int thread);

static struct {
    pthread_mutex_t in_use; /* one pass at a time */
    pthread_mutex_t lock;
    pthread_cond_t posted;
    int num_workers, wanted;
    long round;
    work run;
    void *task;
    team team;
} pool = {.in_use = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .posted = PTHREAD_COND_INITIALIZER};

static void *worker(void *argument) {
    int thread = (int)(intptr_t)argument;
    long seen = 0;
    for (;;) {
        pthread_mutex_lock(&pool.lock);
        while (pool.round == seen || thread >= pool.wanted) {
            seen = pool.round;
            pthread_cond_wait(&pool.posted, &pool.lock);
        }
        seen = pool.round;
        work run = pool.run;
        void *task = pool.task;
        pthread_mutex_unlock(&pool.lock);
        run(task, &pool.team, thread);
        meet(&pool.team);
    }
    return NULL;
}

static void enter(void) { pthread_mutex_lock(&pool.in_use); }
static void leave(void) { pthread_mutex_unlock(&pool.in_use); }

/* Runs a task on `num_threads` threads, the caller's among them. To be called after `enter`. */
static void run_team(work run, void *task, int num_threads) {
    pthread_mutex_lock(&pool.lock);
    while (pool.num_workers < num_threads - 1) {
        pthread_t id;
        if (pthread_create(&id, NULL, worker, (void *)(intptr_t)(pool.num_workers + 1))) break;
        pthread_detach(id);
        pool.num_workers++;
    }
    pool.wanted = pool.num_workers + 1 < num_threads ? pool.num_workers + 1 : num_threads;
    pool.team.size = pool.wanted;
    atomic_store(&pool.team.next, 0);
    pool.run = run;
    pool.task = task;
    pool.round++;
    pthread_cond_broadcast(&pool.posted);
    pthread_mutex_unlock(&pool.lock);
    run(task, &pool.team, 0);
    meet(&pool.team);
}
