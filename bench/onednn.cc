// bf16 x bf16 -> f32 products of oneDNN, for `weft bench kernels --compare`. A module that the program opens
// when asked, so that the product is never linked with it.
#include <omp.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <dnnl.hpp>
#include <vector>

namespace {

using dnnl::memory;

void* huge_pages(size_t bytes) {
  constexpr size_t kPage = size_t{2} << 20;
  const size_t length = (bytes + kPage - 1) / kPage * kPage;
  void* p = std::aligned_alloc(kPage, length);
  madvise(p, length, MADV_HUGEPAGE);
  return p;
}

// The values that the other side multiplies too: +-[1/8, 1/2)
void fill(void* at, size_t count) {
  uint64_t state = 0x9E3779B97F4A7C15u;
  auto* p = static_cast<uint16_t*>(at);
  for (size_t i = 0; i < count; ++i) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    p[i] = static_cast<uint16_t>((state & 0x80FF) | 0x3E00);
  }
}

struct Product {
  Product(int m, int n, int k, int copies, int threads)
      : threads(threads), engine(dnnl::engine::kind::cpu, 0), stream(engine) {
    omp_set_num_threads(threads);
    const memory::desc a_desc({m, k}, memory::data_type::bf16, memory::format_tag::ab);
    const memory::desc any({k, n}, memory::data_type::bf16, memory::format_tag::any);
    const memory::desc c_desc({m, n}, memory::data_type::f32, memory::format_tag::ab);
    const dnnl::matmul::primitive_desc pd({a_desc, any, c_desc}, engine);
    matmul = dnnl::matmul(pd);
    a = memory(a_desc, engine), c = memory(c_desc, engine);
    fill(a.get_data_handle(), static_cast<size_t>(m) * k);
    memory plain({{k, n}, memory::data_type::bf16, memory::format_tag::ab}, engine);
    fill(plain.get_data_handle(), static_cast<size_t>(n) * k);
    const size_t bytes = pd.weights_desc().get_size();
    room = huge_pages(bytes * copies);
    for (int i = 0; i < copies; ++i)
      weights.emplace_back(pd.weights_desc(), engine, static_cast<char*>(room) + bytes * i);
    dnnl::reorder(plain, weights[0]).execute(stream, plain, weights[0]);
    stream.wait();
    for (int i = 1; i < copies; ++i) std::memcpy(static_cast<char*>(room) + bytes * i, room, bytes);
  }
  ~Product() { std::free(room); }
  void run(int copy) {
    omp_set_num_threads(threads);
    matmul.execute(stream, {{DNNL_ARG_SRC, a}, {DNNL_ARG_WEIGHTS, weights[copy]}, {DNNL_ARG_DST, c}});
    stream.wait();
  }
  int threads;
  dnnl::engine engine;
  dnnl::stream stream;
  dnnl::matmul matmul;
  memory a, c;
  void* room = nullptr;
  std::vector<memory> weights;
};

}  // namespace

// C [m, n] f32 = A [m, k] W [k, n], `copies` equal weights in oneDNN's own layout; null where it cannot.
extern "C" void* weft_onednn_create(int m, int n, int k, int copies, int threads) {
  try {
    return new Product(m, n, k, copies, threads);
  } catch (const dnnl::error&) {
    return nullptr;
  }
}
extern "C" void weft_onednn_run(void* product, int copy) {
  static_cast<Product*>(product)->run(copy);
}
extern "C" void weft_onednn_destroy(void* product) {
  delete static_cast<Product*>(product);
}
