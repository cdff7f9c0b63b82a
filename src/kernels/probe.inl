// Loops that do nothing but what they measure: the ceilings `weft bench machine` prints.

// Eight streams of one pass: a single one leaves the line fill buffers idle at every page border.
static void probe_read(const std::byte* data, size_t bytes, float* sink) {
  constexpr int kStreams = 8;
  const size_t stream = bytes / kStreams / 256 * 256;
  V acc[4] = {zero(), zero(), zero(), zero()};
  for (size_t at = 0; at < stream; at += 256)
    for (int s = 0; s < kStreams; ++s) {
      const float* x = reinterpret_cast<const float*>(data + s * stream + at);
      for (int i = 0; i < 4; ++i) acc[i] = max(acc[i], load(x + 16 * i));
    }
  store(sink, max(max(acc[0], acc[1]), max(acc[2], acc[3])));
}

static void probe(const ProbeArgs& p, const Call& call) {
  alignas(64) float sink[256];
  sink[0] = 0;
  const size_t bytes = p.bytes / call.tasks / 4096 * 4096;
  std::byte* own = p.data + bytes * call.task;
  switch (p.kind) {
    case Probe::product:
      peak_product(p.data, p.rounds, sink);
      break;
    case Probe::product_int8:
      peak_int8(p.data, p.rounds, sink);
      break;
    case Probe::fma:
      peak_fma(p.data, p.rounds, sink);
      break;
    case Probe::read:
      for (int round = 0; round < p.rounds; ++round) probe_read(own, bytes, sink);
      break;
    case Probe::write:
      for (int round = 0; round < p.rounds; ++round)
        for (size_t at = 0; at < bytes; at += 64)
          store(reinterpret_cast<float*>(own + at), set1(static_cast<float>(round)));
      break;
  }
  p.sink[16 * call.task] = sink[0];
}
