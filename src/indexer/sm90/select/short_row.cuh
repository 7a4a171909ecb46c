// Selection of a row that fits into the buffer as it is.
//
// A warp owns `vectors` runs of 128 consecutive columns, a lane four of each; a thread copies its
// own scores and nobody else reads them. Every fourth is sampled: a histogram of 256 bins gives two
// bounds that very likely enclose the K-th. Scores above the upper bound are counted, those between
// are listed in any order, and a second histogram and a direct comparison rank the list. If the
// counts say that the K-th is in the list, its value and the number of its equals that enter are
// exact, whatever the sample held; then the chosen are put down in column order. Else (a misleading
// sample, plateaus, infinities) the answer is no.
#pragma once

#include "core/cuda/ptx.cuh"
#include "indexer/sm90/select/task.cuh"

namespace flashdsa::indexer::sm90::select_pass {

using core::cuda::cp_async_16;
using core::cuda::cp_async_wait_all;
using core::cuda::shared_address;

template <typename Config>
struct ShortRow {
  static constexpr int kVectors = 8;  // 16-byte pieces of a thread, a bit of a mask per word
  static constexpr int kListed = Config::kWords - kShortColumns;  // behind the row's scores
  static constexpr int kSampleShare = 4;
  static constexpr int kBins = 256;
  static_assert(4 * kVectors * Config::kThreads == kShortColumns, "a bit per column");
  static constexpr float kSigmas = 5;  // of the sample's count, to both sides

  using Scores = Input<Source::kScores>;

  Selector<Config>& selector;
  SharedStorage<Config>& sm;
  const Scores& input;
  const int topk;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int origin;
  const int vectors;   // runs of a warp
  const int own_word;  // first of this thread in the buffer
  uint32_t valid = 0;  // bit 4j + e: word e of piece j is a column of the input

  __device__ ShortRow(Selector<Config>& s, const Scores& in, int k)
      : selector(s),
        sm(s.sm),
        input(in),
        topk(k),
        origin(in.begin & ~3),
        vectors((in.end - origin + 4 * Config::kThreads - 1) / (4 * Config::kThreads)),
        own_word(s.warp * vectors * 128 + lane * 4) {}

  __device__ __forceinline__ float word(int j, int e) const {
    return __uint_as_float(sm.words[own_word + j * 128 + e]);
  }

  __device__ __forceinline__ void load() {
    for (int j = 0; j < vectors; ++j) {
      const int at = own_word + j * 128, left = input.end - origin - at;
      if (left > 0) {
        cp_async_16(shared_address(&sm.words[at]), input.address(origin + at), 16);
        valid |= (left < 4 ? (1u << left) - 1 : 15u) << (4 * j);
      }
    }
    // Only the row's first piece may begin before the input.
    if (own_word == 0) valid &= ~0u << (input.begin - origin);
    cp_async_wait_all();
  }

  // Bits of the valid words for which the tests hold.
  template <typename First, typename Second>
  __device__ __forceinline__ void masks_of(First first, Second second, uint32_t& of_first,
                                           uint32_t& of_second) const {
    of_first = of_second = 0;
#pragma unroll 2
    for (int j = 0; j < vectors; ++j) {
      const float4 v = *reinterpret_cast<const float4*>(&sm.words[own_word + j * 128]);
      const float score[4] = {v.x, v.y, v.z, v.w};
      uint32_t a = 0, b = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (first(score[e])) a |= 1u << e;
        if (second(score[e])) b |= 1u << e;
      }
      of_first |= a << (4 * j);
      of_second |= b << (4 * j);
    }
    of_first &= valid;
    of_second &= valid;
  }

  // Calls use(score) for the valid ones of every fourth word, from all banks at once.
  template <typename Use>
  __device__ __forceinline__ void for_sample(Use use) const {
#pragma unroll 2
    for (int j = 0; j < vectors; ++j) {
      const int e = (lane / 8 + j) % kSampleShare;
      if ((valid >> (4 * j + e) & 1u) != 0) use(word(j, e));
    }
  }

  // Monotone, whatever the score; NaN has no bin of its own.
  static __device__ __forceinline__ uint32_t bin_of(float score, float low, float scale) {
    constexpr float kUnit = 8388608.f;  // the sum's unit is 1, so that its lower bits are the bin
    const float place = fminf(fmaxf((score - low) * scale, 0.f), kBins - 1.f);
    return __float_as_uint(place + kUnit) & (kBins - 1);
  }

  // A histogram's bins as every warp holds them, from the top: a lane has eight.
  struct Bins {
    uint32_t count[8];
    int above, sum;  // of the lane
  };
  __device__ __forceinline__ Bins read_bins(const uint32_t* bins) const {
    Bins b;
    const uint4 high = *reinterpret_cast<const uint4*>(&bins[kBins - 8 * lane - 4]);
    const uint4 low = *reinterpret_cast<const uint4*>(&bins[kBins - 8 * lane - 8]);
    b.count[0] = high.w, b.count[1] = high.z, b.count[2] = high.y, b.count[3] = high.x;
    b.count[4] = low.w, b.count[5] = low.z, b.count[6] = low.y, b.count[7] = low.x;
    b.sum = 0;
#pragma unroll
    for (const uint32_t count : b.count) b.sum += static_cast<int>(count);
    int inclusive = b.sum;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const int left = __shfl_up_sync(kAllLanes, inclusive, d);
      if (lane >= d) inclusive += left;
    }
    b.above = inclusive - b.sum;
    return b;
  }

  // The bin of the wanted-th best, -1 if there are fewer; how many are above it, and in it.
  struct Crossing {
    int bin, above, inside;
  };
  __device__ __forceinline__ Crossing crossing(const Bins& b, int wanted) const {
    Crossing found{-1, b.above, 0};
    int above = b.above;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int here = static_cast<int>(b.count[i]);
      if (above < wanted && wanted <= above + here) found = {kBins - 1 - 8 * lane - i, above, here};
      above += here;
    }
    const uint32_t lanes = __ballot_sync(kAllLanes, found.bin >= 0);
    const int from = lanes == 0 ? 0 : __ffs(static_cast<int>(lanes)) - 1;
    return {__shfl_sync(kAllLanes, found.bin, from), __shfl_sync(kAllLanes, found.above, from),
            __shfl_sync(kAllLanes, found.inside, from)};
  }

  // Bounds that very likely enclose the K-th, and a base and a scale for bins between them.
  struct Bracket {
    float low, high;  // may be infinite
    float base, scale;
  };
  __device__ bool bracket(Bracket& found) {
    float least = __uint_as_float(0x7F800000u), most = -least;
    for_sample([&](float score) {
      least = fminf(least, score);
      most = fmaxf(most, score);
    });
    const uint32_t low_rank = __reduce_min_sync(kAllLanes, rank_of(least));
    const uint32_t high_rank = __reduce_max_sync(kAllLanes, rank_of(most));
    if (lane == 0) {
      sm.warp_min[selector.warp] = low_rank;
      sm.warp_max[selector.warp] = high_rank;
    }
    uint32_t* bins = sm.bins;
    for (int i = selector.thread; i < 2 * kBins; i += Config::kThreads) bins[i] = 0;
    if (selector.thread == 0) sm.listed = sm.above = sm.in_bin = 0;
    __syncthreads();
    uint32_t low = ~0u, high = 0;
#pragma unroll
    for (int i = 0; i < Config::kWarps; ++i) {
      low = min(low, sm.warp_min[i]);
      high = max(high, sm.warp_max[i]);
    }
    least = score_of(low);
    most = score_of(high);
    const float width = most - least, scale = (kBins - 1) / width;
    if (!(scale > 0.f && scale < 1e30f && width < 1e30f)) return false;
    for_sample([&](float score) { atomicAdd(&bins[bin_of(score, least, scale)], 1u); });
    __syncthreads();
    const Bins sample = read_bins(bins);
    const float share = static_cast<float>(topk) / static_cast<float>(input.live);
    const float expected = static_cast<float>(topk) / kSampleShare;
    const float slack = kSigmas * sqrtf(expected * (1.f - share)) + 2.f;
    const int low_bin = crossing(sample, static_cast<int>(expected + slack)).bin;
    const int high_bin = crossing(sample, static_cast<int>(expected - slack)).bin;
    // A bin reaches half its width to both sides of its middle.
    found.low = low_bin < 0 ? __uint_as_float(0xFF800000u)
                            : least + (static_cast<float>(low_bin) - .5f) / scale;
    found.high = high_bin < 0 ? __uint_as_float(0x7F800000u)
                              : least + (static_cast<float>(high_bin) + .5f) / scale;
    found.base = low_bin < 0 ? least : found.low;
    found.scale = (kBins - 1) / ((high_bin < 0 ? most : found.high) - found.base);
    return found.scale > 0.f && found.scale < 1e30f;
  }

  // Runs of this warp: chosen words of a run before this lane, and of whole runs, 8 bits a run.
  struct Places {
    uint32_t before[2], runs[2];
  };
  __device__ __forceinline__ Places places_of(uint32_t mask) const {
    Places places;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Counts of the bits of each nibble, moved apart to bytes.
      uint32_t own = mask >> (16 * half) & 0xFFFFu;
      own = (own | own << 8) & 0x00FF00FFu;
      own = (own | own << 4) & 0x0F0F0F0Fu;
      own = own - (own >> 1 & 0x05050505u);
      own = (own & 0x03030303u) + (own >> 2 & 0x03030303u);
      uint32_t inclusive = own;
#pragma unroll
      for (int d = 1; d < 32; d <<= 1) {
        const uint32_t left = __shfl_up_sync(kAllLanes, inclusive, d);
        if (lane >= d) inclusive += left;
      }
      places.runs[half] = __shfl_sync(kAllLanes, inclusive, 31);
      places.before[half] = inclusive - own;
    }
    return places;
  }

  // Calls put(position, j, e) for the words of the mask, positions in column order from `first`.
  template <typename Put>
  __device__ __forceinline__ void for_places(uint32_t mask, const Places& places, int first,
                                             Put put) const {
    int run = first;
    for (int j = 0; j < vectors; ++j) {
      const int shift = 8 * (j & 3);
      const uint32_t before = j < 4 ? places.before[0] : places.before[1];
      const uint32_t runs = j < 4 ? places.runs[0] : places.runs[1];
      int at = run + static_cast<int>(before >> shift & 255u);
      run += static_cast<int>(runs >> shift & 255u);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if ((mask >> (4 * j + e) & 1u) != 0) put(at++, j, e);
      }
    }
  }

  // Lists the scores between the bounds; whether the K-th is among them. `need`: its place there.
  __device__ bool list_between(const Bracket& b, int& need) {
    uint32_t above, inside;
    masks_of([&](float v) { return !(v <= b.high); }, [&](float v) { return v >= b.low; }, above,
             inside);
    inside &= ~above;
    const int own = __popc(inside);
    int before = own;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const int left = __shfl_up_sync(kAllLanes, before, d);
      if (lane >= d) before += left;
    }
    const int above_sum = __reduce_add_sync(kAllLanes, __popc(above));
    int first = 0;
    if (lane == 31) {
      first = static_cast<int>(atomicAdd(&sm.listed, static_cast<uint32_t>(before)));
      atomicAdd(&sm.above, static_cast<uint32_t>(above_sum));
    }
    int at = __shfl_sync(kAllLanes, first, 31) + before - own;
    if (at + own <= kListed) {
      for (uint32_t left = inside; left != 0; left &= left - 1) {
        const int i = __ffs(static_cast<int>(left)) - 1;
        list()[at++] = __float_as_uint(word(i / 4, i % 4));
      }
    }
    __syncthreads();
    need = topk - static_cast<int>(sm.above);
    const int listed = static_cast<int>(sm.listed);
    return need > 0 && need <= listed && listed <= kListed;
  }

  __device__ __forceinline__ uint32_t* list() const { return sm.words + kShortColumns; }

  // The need-th best of the list, unless too many share its bin.
  __device__ bool rank_list(const Bracket& b, int need, Threshold& kth) {
    const int listed = static_cast<int>(sm.listed);
    uint32_t* bins = sm.bins + kBins;
    for (int i = selector.thread; i < listed; i += Config::kThreads) {
      atomicAdd(&bins[bin_of(__uint_as_float(list()[i]), b.base, b.scale)], 1u);
    }
    __syncthreads();
    const Crossing kept = crossing(read_bins(bins), need);
    if (kept.inside > Config::kList) return false;
    for (int i = selector.thread; i < listed; i += Config::kThreads) {
      const float score = __uint_as_float(list()[i]);
      if (bin_of(score, b.base, b.scale) == static_cast<uint32_t>(kept.bin)) {
        sm.list[atomicAdd(&sm.in_bin, 1u)] = rank_of(score);
      }
    }
    kth = selector.rank_list(kept.inside, need - kept.above);
    return true;
  }

  // The words that are selected, and how many other warps' are before this one's.
  __device__ __forceinline__ uint32_t chosen(Threshold kth, int& first) {
    const float bound = score_of(kth.rank);
    uint32_t mask, same;
    masks_of([&](float v) { return !(v < bound); }, [&](float v) { return v == bound; }, mask,
             same);
    const int counts = __popc(mask) | __popc(same) << 16;
    const int sum = __reduce_add_sync(kAllLanes, counts);
    uint32_t* sums = sm.warp_sum[selector.parity];
    if (lane == 0) sums[selector.warp] = static_cast<uint32_t>(sum);
    __syncthreads();
    selector.parity ^= 1;
    uint32_t before = 0, all = 0;
#pragma unroll
    for (int i = 0; i < Config::kWarps; ++i) {
      if (i < selector.warp) before += sums[i];
      all += sums[i];
    }
    const int same_before = static_cast<int>(before >> 16);
    first = static_cast<int>(before & 0xFFFFu) - max(same_before - kth.equal, 0);
    if (static_cast<int>(all >> 16) > kth.equal) {  // the first of the equals alone
      uint32_t late = 0;
      for_places(same, places_of(same), same_before, [&](int place, int j, int e) {
        if (place >= kth.equal) late |= 1u << (4 * j + e);
      });
      mask &= ~late;
    }
    return mask;
  }

  // Selects and writes, unless the sample has misled.
  __device__ bool run() {
    load();
    Bracket bounds;
    int need, first;
    Threshold kth;
    if (!bracket(bounds) || !list_between(bounds, need) || !rank_list(bounds, need, kth)) {
      __syncthreads();  // what others still read is free
      return false;
    }
    const uint32_t mask = chosen(kth, first);
    const Places places = places_of(mask);
    for_places(mask, places, first, [&](int at, int j, int e) {
      sm.bins[at] = static_cast<uint32_t>(origin + own_word + j * 128 + e);
    });
    write_keys(sm, input, topk, topk);
    if (!reports_ranks(sm.output)) return true;
    for_places(mask, places, first,
               [&](int at, int j, int e) { sm.bins[at] = rank_of(word(j, e)); });
    write_ranks(sm, topk, topk);
    return true;
  }
};

}  // namespace flashdsa::indexer::sm90::select_pass
