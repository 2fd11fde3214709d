// A long, narrow, lossy link between two network namespaces, for kernels without netem.
//
//     link NAMESPACE_A ADDRESS_A NAMESPACE_B ADDRESS_B DEVICE RATE_MBIT DELAY_MS LOSS QUEUE_KB SEED
//
// A TUN device in each namespace, and a thread for each direction, which reads what the kernel sends on
// one device and writes it to the other when it is due (line.h). Segmentation is left to the far kernel:
// packets of up to 64 KiB pass as they are, so that one core carries several Gbit/s, but rate, queue and
// loss are applied to each segment of the MTU. Says "ready", then obeys a line at a time on its input:
//
//     count         {"ab": {bytes, segments, lost, dropped}, "ba": ...} so far, headers included
//     loss SHARE    from now on
//     down | up     everything is lost | nothing more than the share
//
// and ends with its input. DELAY is one way; LOSS a share of segments; times are CLOCK_MONOTONIC seconds.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "line.h"

enum { HEADER = 10, PACKET = HEADER + 65536, BATCH = 256, SEGMENTS = 64 };
// After each look at a device a direction rests: to wake for every packet took a third of a core at
// 100 Mbit/s. A packet is at most twice this late; what the line carries in this time waits in the device.
static const struct timespec REST = {0, 1000 * 1000};

struct packet {
  struct packet *next;
  double due_s;
  int bytes;
  unsigned char data[];
};

struct direction {
  int in, out;
  struct line line;
  uint64_t random;
  struct packet *first, *last;
  atomic_ulong bytes, segments, lost, dropped;
};

static _Atomic double loss;
static atomic_int is_down;

static void fail(const char *what) {
  perror(what);
  exit(1);
}

static double now_s(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

static int is_lost(struct direction *d) {
  d->random ^= d->random << 13, d->random ^= d->random >> 7, d->random ^= d->random << 17;  // xorshift64
  return is_down || (double)(d->random >> 11) * 0x1p-53 < loss;
}

static void put_in_flight(struct direction *d, const unsigned char *data, int bytes, double wire_bytes,
                          int segments, double now) {
  struct packet *packet = malloc(sizeof *packet + bytes);
  if (!packet) fail("malloc");
  packet->next = NULL, packet->bytes = bytes, packet->due_s = line_arrival(&d->line, now, wire_bytes);
  memcpy(packet->data, data, bytes);
  if (d->last) d->last->next = packet;
  else d->first = packet;
  d->last = packet;
  d->bytes += (unsigned long)wire_bytes;
  d->segments += segments;
}

static uint32_t sum16(const unsigned char *bytes, int count, uint32_t sum) {
  for (; count > 1; count -= 2, bytes += 2) sum += bytes[0] << 8 | bytes[1];
  return sum;
}

static uint16_t folded(uint32_t sum) {
  while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
  return sum;
}

static void put16(unsigned char *at, uint16_t value) { at[0] = value >> 8, at[1] = value; }

// Segments first..end of a packet that the kernel has not cut yet, as a packet of their own.
static void put_segments(struct direction *d, const unsigned char *whole, int total, int first, int end,
                         double now) {
  static __thread unsigned char data[PACKET];
  const struct virtio_net_hdr *about = (const void *)whole;
  const unsigned char *ip = whole + HEADER;
  int ip_bytes = (ip[0] & 15) * 4, tcp_bytes = (ip[ip_bytes + 12] >> 4) * 4, headers = ip_bytes + tcp_bytes;
  int payload = total - HEADER - headers, size = about->gso_size, count = (payload + size - 1) / size;
  int from = first * size, bytes = (end < count ? end * size : payload) - from;
  memcpy(data, whole, HEADER + headers);
  memcpy(data + HEADER + headers, ip + headers + from, bytes);
  unsigned char *new_ip = data + HEADER, *tcp = new_ip + ip_bytes;
  uint32_t sequence;
  memcpy(&sequence, tcp + 4, 4);
  sequence = htonl(ntohl(sequence) + from);
  memcpy(tcp + 4, &sequence, 4);
  if (end < count) tcp[13] &= ~0x09;  // FIN, PSH: of the last segment
  if (first > 0) tcp[13] &= ~0x80;    // CWR: of the first
  put16(new_ip + 2, headers + bytes);
  put16(new_ip + 4, (ip[4] << 8 | ip[5]) + first);
  put16(new_ip + 10, 0);
  put16(new_ip + 10, ~folded(sum16(new_ip, ip_bytes, 0)));
  // The rest of the checksum is the far kernel's work; the pseudo header has the new length.
  put16(tcp + 16, folded(sum16(new_ip + 12, 8, IPPROTO_TCP + tcp_bytes + bytes)));
  struct virtio_net_hdr *new_about = (void *)data;
  if (bytes <= size) new_about->gso_type = VIRTIO_NET_HDR_GSO_NONE, new_about->gso_size = 0;
  put_in_flight(d, data, HEADER + headers + bytes, bytes + (double)(end - first) * headers, end - first, now);
}

static void take(struct direction *d, const unsigned char *data, int bytes, double now) {
  const struct virtio_net_hdr *about = (const void *)data;
  const unsigned char *ip = data + HEADER;
  if (ip[0] >> 4 != 4) return;  // the links speak IPv4
  int ip_bytes = (ip[0] & 15) * 4;
  int is_uncut = (about->gso_type & ~VIRTIO_NET_HDR_GSO_ECN) == VIRTIO_NET_HDR_GSO_TCPV4 && about->gso_size;
  int headers = is_uncut ? ip_bytes + (ip[ip_bytes + 12] >> 4) * 4 : 0, payload = bytes - HEADER - headers;
  int size = is_uncut ? about->gso_size : payload, count = (payload + size - 1) / size;
  int room = line_room(&d->line, now, size + headers, count), is_whole = room == count;
  char survives[SEGMENTS];
  if (count > SEGMENTS) fail("a packet of too many segments");
  d->dropped += count - room;
  for (int i = 0; i < count; i++) {
    int lost = i < room && is_lost(d);
    survives[i] = i < room && !lost;
    d->lost += lost;
    is_whole = is_whole && !lost;
  }
  if (is_whole) {
    put_in_flight(d, data, bytes, payload + (double)count * headers, count, now);
    return;
  }
  for (int i = 0, end; is_uncut && i < count; i = end) {
    for (end = i; end < count && survives[end] == survives[i];) end++;
    if (survives[i]) put_segments(d, data, bytes, i, end, now);
  }
}

static void *carry(void *argument) {
  static __thread unsigned char data[PACKET];
  struct direction *d = argument;
  prctl(PR_SET_TIMERSLACK, 1UL);
  // A link does not wait for the processes that use it. Where this is not allowed, it may.
  pthread_setschedparam(pthread_self(), SCHED_FIFO, &(struct sched_param){.sched_priority = 1});
  for (;;) {
    double now = now_s();
    int taken = 0;
    for (ssize_t bytes; taken < BATCH && (bytes = read(d->in, data, sizeof data)) > HEADER; taken++)
      take(d, data, (int)bytes, now);
    now = now_s();
    while (d->first && d->first->due_s <= now) {
      struct packet *packet = d->first;
      if (write(d->out, packet->data, packet->bytes) < 0 && errno != EAGAIN && errno != ENOBUFS) d->lost++;
      d->first = packet->next;
      if (!d->first) d->last = NULL;
      free(packet);
    }
    if (taken == BATCH) continue;
    nanosleep(&REST, NULL);
    double wait_s = d->first ? d->first->due_s - now_s() : 1;
    if (wait_s <= 0) continue;
    struct timespec wait = {(time_t)wait_s, (long)((wait_s - (time_t)wait_s) * 1e9)};
    struct pollfd input = {d->in, POLLIN, 0};
    ppoll(&input, 1, &wait, NULL);
  }
  return NULL;
}

static int open_device(const char *namespace, const char *address, const char *peer, const char *name) {
  char text[256];
  int own = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
  snprintf(text, sizeof text, "/run/netns/%s", namespace);
  int other = open(text, O_RDONLY | O_CLOEXEC);
  if (own < 0 || other < 0 || setns(other, CLONE_NEWNET)) fail(namespace);
  int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
  strncpy(request.ifr_name, name, IFNAMSIZ - 1);
  int header = HEADER;
  if (device < 0 || ioctl(device, TUNSETIFF, &request) || ioctl(device, TUNSETVNETHDRSZ, &header) ||
      ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4))
    fail("/dev/net/tun");
  snprintf(text, sizeof text, "ip addr add %s peer %s dev %s && ip link set %s mtu 1500 txqueuelen 10000 up",
           address, peer, name, name);
  if (system(text)) fail("ip");
  if (setns(own, CLONE_NEWNET)) fail("setns");
  close(own), close(other);
  return device;
}

static void print_counts(const char *name, struct direction *d, const char *after) {
  printf("\"%s\": {\"bytes\": %lu, \"segments\": %lu, \"lost\": %lu, \"dropped\": %lu}%s", name, d->bytes,
         d->segments, d->lost, d->dropped, after);
}

int main(int count, char **arguments) {
  static struct direction ab, ba;
  if (count != 11) return 2;
  char **a = arguments;
  struct line line = {atof(a[6]) * 1e6 / 8, atof(a[7]) / 1e3, atof(a[9]) * 1e3, 0};
  loss = atof(a[8]);
  ab.line = ba.line = line;
  ab.random = (strtoull(a[10], NULL, 0) + 1) * 0x9E3779B97F4A7C15u, ba.random = ~ab.random;
  ab.in = ba.out = open_device(a[1], a[2], a[4], a[5]);
  ba.in = ab.out = open_device(a[3], a[4], a[2], a[5]);
  pthread_t threads[2];
  if (pthread_create(&threads[0], NULL, carry, &ab) || pthread_create(&threads[1], NULL, carry, &ba))
    fail("pthread_create");
  setvbuf(stdout, NULL, _IOLBF, 0);
  puts("ready");
  char order[64];
  while (fgets(order, sizeof order, stdin)) {
    if (!strncmp(order, "loss ", 5)) loss = atof(order + 5);
    if (!strcmp(order, "down\n")) is_down = 1;
    if (!strcmp(order, "up\n")) is_down = 0;
    if (strcmp(order, "count\n")) continue;
    putchar('{');
    print_counts("ab", &ab, ", ");
    print_counts("ba", &ba, "}\n");
  }
}
