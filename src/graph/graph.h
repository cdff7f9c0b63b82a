// A step as a list of kernel calls. Appended once while the model is built; the order of calls is a valid
// schedule, and what each call reads and writes says which others are: a pointer to const in the arguments
// reads, any other writes.
//
// Pointers in a node's arguments are named by slots until the plan knows addresses: a value of the step
// (arena, given an offset by its lifetime) or something that outlives it (weights, caches, bound by the
// model).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "kernels/kernels.h"
#include "kernels/work.h"

namespace weft {

struct Slot {
  int id = -1;
  explicit operator bool() const { return id >= 0; }
};

// A value: rows of one token (or one logit row, one expert slot) each, `ld` elements apart; a view starts
// `offset` elements into its rows.
struct Val {
  Slot slot;
  int width = 0;
  int ld = 0;
  int offset = 0;
  int element_bytes = 4;
  explicit operator bool() const { return static_cast<bool>(slot); }
};

inline constexpr size_t kMaxArgsBytes = 1024;

struct Node {
  const char* op;
  std::string label;  // "layers.3.q_a_proj"
  const void* kernel;
  void (*invoke)(const void* kernel, const void* args, const Call& call);
  int (*units)(const void* args, const StepHeader& step);
  Cost (*cost)(const void* args, const StepHeader& step);
  FirstWeights (*first_weights)(const void* args, const StepHeader& step, int task, int tasks);
  bool grows;  // with the context, not only with the rows of the step
  std::vector<std::byte> args;
  // By plan():
  std::vector<int>
      after{};    // nodes that must be complete before this one begins; those implied by others left out
  int stage = 0;  // nodes of one stage do not depend on each other
  int lane = 0;   // place among the nodes of its stage: the stream it runs in
};

class Graph {
 public:
  // Values of the step. bytes covers all rows, padding included.
  Slot value(std::string label, size_t bytes);
  // Memory that somebody else owns; bind() gives its address before the first run.
  Slot external(std::string label);
  void bind(Slot slot, const void* address);

  // Collects one node: fill `args`, name its pointers, add.
  template <class Args>
  class Make;
  template <class Args>
  Make<Args> make(const char* op, std::string label, KernelFn<Args> kernel);

  const std::vector<Node>& nodes() const { return nodes_; }
  Graph hollow() const;  // the same, whose kernels do nothing: what running it costs by itself

  // Dependencies, stages and arena offsets. Two values share memory only if every use of one is complete
  // before the other's first can begin, whatever valid schedule runs. After it only bind() and patch() may
  // follow.
  void plan();
  size_t arena_bytes() const { return arena_bytes_; }
  size_t value_bytes() const;  // of all values, had none shared memory
  int stages() const { return static_cast<int>(stages_.size()); }
  const std::vector<int>& stage(int i) const { return stages_[i]; }  // nodes
  struct Place {
    size_t offset, bytes;
    int first, last;  // nodes
  };
  Place place(Slot value) const;
  // Writes every pointer. error (CHECK): an external that was never bound.
  void patch(std::byte* arena);

 private:
  struct SlotInfo {
    std::string label;
    size_t bytes = 0;           // 0: external
    int first = -1, last = -1;  // nodes
    std::vector<int> users{};   // nodes, ascending
    size_t offset = 0;
    const void* address = nullptr;
  };
  struct Fixup {
    int node;
    size_t field;  // byte offset of the pointer in the arguments
    Slot slot;
    size_t byte_offset;
    bool writes;
  };
  class Order;
  Order depend();
  void stage();
  void place(const Order& order);
  void append(Node node, std::vector<Fixup> fixups);

  std::vector<SlotInfo> slots_;
  std::vector<Node> nodes_;
  std::vector<Fixup> fixups_;
  std::vector<std::vector<int>> stages_;
  size_t arena_bytes_ = 0;
};

template <class Args>
class Graph::Make {
 public:
  Make(Graph& graph, const char* op, std::string label, KernelFn<Args> kernel)
      : graph_(graph),
        node_{op,
              std::move(label),
              reinterpret_cast<const void*>(kernel),
              invoke,
              units,
              cost,
              first_weights,
              kGrowsWithContext<Args>,
              {}} {
    static_assert(sizeof(Args) <= kMaxArgsBytes && std::is_trivially_copyable_v<Args>);
  }
  Make(const Make&) = delete;
  Args* operator->() { return &args_; }

  // `field` must be a pointer inside the arguments.
  template <class P>
  Make& at(P*& field, Slot slot, size_t byte_offset = 0) {
    if (slot)
      fixups_.push_back(
          {0,
           static_cast<size_t>(reinterpret_cast<std::byte*>(&field) - reinterpret_cast<std::byte*>(&args_)),
           slot, byte_offset, !std::is_const_v<P>});
    return *this;
  }
  template <class P>
  Make& at(P*& field, const Val& val) {
    return at(field, val.slot, static_cast<size_t>(val.offset) * val.element_bytes);
  }
  void add() {
    node_.args.resize(sizeof(Args));
    std::memcpy(node_.args.data(), &args_, sizeof(Args));
    graph_.append(std::move(node_), std::move(fixups_));
  }

 private:
  static void invoke(const void* kernel, const void* args, const Call& call) {
    reinterpret_cast<KernelFn<Args>>(const_cast<void*>(kernel))(*static_cast<const Args*>(args), call);
  }
  static int units(const void* args, const StepHeader& step) {
    return weft::units(*static_cast<const Args*>(args), step);
  }
  static Cost cost(const void* args, const StepHeader& step) {
    return weft::cost(*static_cast<const Args*>(args), step);
  }
  static FirstWeights first_weights(const void* args, const StepHeader& step, int task, int tasks) {
    return weft::first_weights(*static_cast<const Args*>(args), step, task, tasks);
  }

  Graph& graph_;
  Node node_;
  Args args_{};
  std::vector<Fixup> fixups_;
};

template <class Args>
Graph::Make<Args> Graph::make(const char* op, std::string label, KernelFn<Args> kernel) {
  return Make<Args>(*this, op, std::move(label), kernel);
}

}  // namespace weft
