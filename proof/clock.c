/* A wall clock that can be set: preloaded, it is wrong by the seconds in a file, now.
 *
 * DISLOCK_PROOF_CLOCK names the file: one signed 64-bit number of the machine.  The monotonic clock
 * and all sleeps stay right, since whoever judges goes by them.  (libfaketime breaks the sleep of
 * Python 3.11, and does not start beside jemalloc.)
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const int64_t right = 0;
static const volatile int64_t *wrong_by = &right;

__attribute__((constructor)) static void look(void) {
  const char *name = getenv("DISLOCK_PROOF_CLOCK");
  int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *found = mmap(NULL, sizeof right, PROT_READ, MAP_SHARED, file, 0);
  if (found != MAP_FAILED) wrong_by = found;
  close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int failed = syscall(SYS_clock_gettime, clock, now);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *wrong_by;
  return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  (void)zone;
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *kept) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  if (kept) *kept = exact.tv_sec;
  return exact.tv_sec;
}
