// The latent rows of a sequence as both attentions read them: by position or by list, a block at a time, as
// operands.

struct LatentRows {
  const std::byte* slab;
  size_t page_bytes, row_bytes;
  const int32_t* pages;
  const int32_t* list;  // null: positions
  int latent, rope, width;
  LatentFormat format;

  template <class Args>
  LatentRows(const Args& a, const StepHeader& step, int t, const int32_t* list)
      : slab(a.slab),
        page_bytes(a.page_bytes),
        row_bytes(latent_row_bytes(a.format, a.latent, a.rope, sizeof(op_t))),
        pages(step.block_table + static_cast<size_t>(step.span[step.span_of[t]].table) * step.table_stride),
        list(list),
        latent(a.latent),
        rope(a.rope),
        width(round_up(a.latent + a.rope, kStep)),
        format(a.format) {}
  const std::byte* at(int i) const {
    const int position = list ? list[i] : i;
    return slab + static_cast<size_t>(pages[position / kPageTokens]) * page_bytes +
           position % kPageTokens * row_bytes;
  }
  // Whether products can take rows that follow each other from where they lie: 64 of a page.
  bool straight() const {
    return kBf16Operands && !list && format == LatentFormat::operand && latent + rope == width;
  }
  const op_t* in_place(int i) const { return reinterpret_cast<const op_t*>(at(i)); }
  // Two lines: the hardware's streamer sees the start and brings the rest (2,048 cold rows 0.83 -> 0.75 ms,
  // Emerald Rapids). All 18 lines of a row gain no more, and cost warm rows 8 %: they fill the buffers that the
  // tile loads of the products need. Always inline: GCC takes a function that only prefetches for one without
  // effect, and drops its calls.
  [[gnu::always_inline]] inline void fetch(int i) const {
    const std::byte* row = at(i);
    __builtin_prefetch(row, 0, 2), __builtin_prefetch(row + 64, 0, 2);
  }
  // All lines of an fp8 row that is read soon: expanding a row takes so many instructions that the processor
  // does not see the loads of the next one (2,048 cold rows 0.99 -> 0.72 ms). Copied rows gain nothing.
  [[gnu::always_inline]] inline void fetch_narrow(int i) const {
    if (format == LatentFormat::operand) return;
    const std::byte* row = at(i);
    for (size_t line = 0; line < row_bytes + 63; line += 64) __builtin_prefetch(row + line);
  }
  // Row i as `width` operands; writes up to 64 more.
  void read(op_t* to, int i) const {
    const std::byte* row = at(i);
    if (format == LatentFormat::operand) {
      copy_row(to, reinterpret_cast<const op_t*>(row), width);
      return;
    }
    const auto* codes = reinterpret_cast<const uint8_t*>(row);
    const int stored = round_up(latent, kCodeLine), tiles = (latent + kScaleBlock - 1) / kScaleBlock;
    for (int c = 0; c < stored; c += kCodeLine) {
      uint32_t scale;  // a power of two
      __builtin_memcpy(&scale, codes + stored + c / kScaleBlock * 4, 4);
      expand_e4m3_row(to + c, codes + c, static_cast<int>(scale >> 23) - 127);
    }
    const auto* pe = reinterpret_cast<const bf16*>(codes + stored + tiles * 4);
    for (int c = 0; c < rope; c += 16) store_n(to + latent + c, load_n(pe + c, rope - c), rope - c);
    clear(to, latent + rope, width);
  }
};

#ifdef WEFT_FETCHING_PRODUCT
// Rows [next, next + count) below `end`, fetched during the scores of other rows: so many products.
// Zen 4 wants every line of a row asked for, for its streamer does not bring the rest (2,048 cold rows
// gathered in 0.38 ms, so in 0.10), and lines one by one: a hundred in one go hold up the product.
struct RowsAhead {
  static constexpr int kMost = 32;
  const LatentRows& rows;
  int next, end, share, bytes, n = 0;
  const std::byte* at[kMost];
  RowsAhead(const LatentRows& rows, int next, int count, int end, int products)
      : rows(rows),
        next(next),
        end(min_int(end, next + count)),
        share(min_int(kMost, (count + products - 1) / products)),
        bytes(static_cast<int>(rows.row_bytes)) {}
  void begin() {
    for (n = 0; n < share && next < end; ++next) at[n++] = rows.at(next);
  }
  // line i of the rows of this product
  [[gnu::always_inline]] inline void step(int i) const {
    if (i * 64 < bytes)
      for (int r = 0; r < n; ++r) __builtin_prefetch(at[r] + i * 64, 0, 2);
  }
};
#endif
