// When a packet that enters a line now comes out at its far end. Pure: time is an argument.
//
//     enter --wait for the packets ahead--> on the wire (size / rate) --> in flight (delay) --> out
//
// What waits or is on the wire fills the queue; a packet that does not fit is dropped at its tail.
#pragma once

struct line {
  double bytes_per_s;  // 0: the wire takes no time
  double delay_s;      // one way
  double queue_bytes;  // of the router before the wire
  double free_at_s;    // when the wire has taken everything so far
};

// Bytes that are in the queue at `now`.
static double line_backlog(const struct line *line, double now) {
  return line->free_at_s > now ? (line->free_at_s - now) * line->bytes_per_s : 0;
}

// How many packets of `bytes` still fit in the queue at `now`, at most `wanted`.
static int line_room(const struct line *line, double now, double bytes, int wanted) {
  if (line->bytes_per_s <= 0) return wanted;
  double room = (line->queue_bytes - line_backlog(line, now)) / bytes;
  return room < 0 ? 0 : room < wanted ? (int)room : wanted;
}

// When `bytes` that enter at `now` have come out. The caller has looked for room.
static double line_arrival(struct line *line, double now, double bytes) {
  double start = line->free_at_s > now ? line->free_at_s : now;
  line->free_at_s = line->bytes_per_s > 0 ? start + bytes / line->bytes_per_s : start;
  return line->free_at_s + line->delay_s;
}
