// Exact selection among the ranks in a CTA's buffer.
#pragma once

#include <cstdint>

#include "indexer/sm90/select/config.h"

namespace flashdsa::indexer::sm90::select_pass {

inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// SPEC section 3's order of scores as an order of integers: NaN above +inf, -0 equal to +0. No
// score has rank 0, which marks dead entries.
inline constexpr uint32_t kNanRank = 0xFFFFFFFFu;
inline constexpr uint32_t kZeroRank = 0x80000000u;

__device__ __forceinline__ uint32_t rank_of(float score) {
  const uint32_t bits = __float_as_uint(score + 0.f);  // -0 + 0 is +0
  const uint32_t sign = static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31);
  return score != score ? kNanRank : bits ^ (sign | 0x80000000u);
}

// A score of that rank.
__device__ __forceinline__ float score_of(uint32_t rank) {
  return __uint_as_float((rank & 0x80000000u) != 0 ? rank ^ 0x80000000u : ~rank);
}

// What is selected: the ranks above `rank`, and the first `equal` of those that equal it.
struct Threshold {
  uint32_t rank = 0;
  int equal = 0;
};

template <typename Config>
struct Selector {
  SharedStorage<Config>& sm;
  uint32_t highest = 0;  // of the live ranks that this thread has put into the buffer
  uint32_t lowest = ~0u;
  int parity = 0;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread & 31;
  const int warp = thread >> 5;

  __device__ explicit Selector(SharedStorage<Config>& shared) : sm(shared) {}

  // Exclusive sum over the CTA in thread order. One barrier: consecutive calls use alternate rows.
  __device__ uint32_t scan(uint32_t value) {
    uint32_t inclusive = value;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const uint32_t left = __shfl_up_sync(kAllLanes, inclusive, d);
      if (lane >= d) inclusive += left;
    }
    if (lane == 31) sm.warp_sum[parity][warp] = inclusive;
    __syncthreads();
    uint32_t before = 0;
#pragma unroll
    for (int i = 0; i < Config::kWarps; ++i) {
      if (i < warp) before += sm.warp_sum[parity][i];
    }
    parity ^= 1;
    return before + inclusive - value;
  }

  // All ranks in any order, 16 bytes a load; entries behind `count` are dead.
  template <typename Use>
  __device__ __forceinline__ void for_ranks(int count, Use use) {
#pragma unroll 4
    for (int i = thread * 4; i < count; i += Config::kThreads * 4) {
      const uint4 v = *reinterpret_cast<const uint4*>(&sm.words[i]);
      use(v.x);
      use(v.y);
      use(v.z);
      use(v.w);
    }
  }

  // The threshold of the `need` best of words[0, count), which holds more than `need` live ranks.
  // Entries up to the next multiple of 4 are dead.
  __device__ Threshold kth(int count, int need) {
    uint32_t top, low;
    start_histogram(top, low);
    if (top == low) return {top, need};
    Threshold found;
    if (by_width(count, need, top, low, found)) return found;
    return by_digits(count, need, top, low);
  }

  // scan_runs, then emit: calls put(position, entry, rank) for the chosen entries of
  // words[0, count), positions ascending with the entries. Every thread owns a run of entries whose
  // length is an odd number of 16-byte pieces: no bank conflicts.
  struct Runs {
    int from, to, position, equal_left;
  };
  __device__ Runs scan_runs(int count, Threshold threshold) {
    const int pieces = (count + 3) / 4;
    const int each = ((pieces + Config::kThreads - 1) / Config::kThreads) | 1;
    const int from = min(thread * each, pieces), to = min(from + each, pieces);
    uint32_t above = 0, same = 0;
#pragma unroll 4
    for (int i = from; i < to; ++i) {
      const uint4 v = *reinterpret_cast<const uint4*>(&sm.words[4 * i]);
      const uint32_t t = threshold.rank;
      above += (v.x > t) + (v.y > t) + (v.z > t) + (v.w > t);
      same += (v.x == t) + (v.y == t) + (v.z == t) + (v.w == t);
    }
    const uint32_t before = scan(above | same << 16);
    const int same_before = static_cast<int>(before >> 16);
    return {from, to, static_cast<int>(before & 0xFFFF) + min(same_before, threshold.equal),
            threshold.equal - same_before};
  }
  template <typename Put>
  __device__ void emit(const Runs& runs, Threshold threshold, Put put) {
    int position = runs.position, left = runs.equal_left;
#pragma unroll 2
    for (int i = runs.from; i < runs.to; ++i) {
      const uint4 v = *reinterpret_cast<const uint4*>(&sm.words[4 * i]);
      const uint32_t rank[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool same = rank[e] == threshold.rank;
        if (rank[e] > threshold.rank || (same && left > 0)) put(position++, 4 * i + e, rank[e]);
        left -= same;
      }
    }
  }

  // Ranks the few members of a bin, which the caller has listed, against each other.
  __device__ Threshold rank_list(int members, int wanted) {
    __syncthreads();
    if (thread < members) {
      const uint32_t mine = sm.list[thread];
      int greater = 0, same = 0;
      for (int i = 0; i < members; ++i) {
        const uint32_t other = sm.list[i];
        greater += other > mine;
        same += other == mine;
      }
      if (greater < wanted && wanted <= greater + same) {
        sm.threshold = mine;
        sm.equal = static_cast<uint32_t>(wanted - greater);
      }
    }
    __syncthreads();
    return {sm.threshold, static_cast<int>(sm.equal)};
  }

 private:
  // Empties the bins; the highest and the lowest live rank of the buffer.
  __device__ void start_histogram(uint32_t& top, uint32_t& low) {
    top = __reduce_max_sync(kAllLanes, highest);
    low = __reduce_min_sync(kAllLanes, lowest);
    if (lane == 0) {
      sm.warp_max[warp] = top;
      sm.warp_min[warp] = low;
    }
    for (int i = thread; i < Config::kBins / 4; i += Config::kThreads) {
      reinterpret_cast<uint4*>(sm.bins)[i] = make_uint4(0, 0, 0, 0);
    }
    if (thread == 0) sm.listed = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Config::kWarps; ++i) {
      top = max(top, sm.warp_max[i]);
      low = min(low, sm.warp_min[i]);
    }
  }

  // Finds the bin that holds the wanted-th best: sm.bin, sm.above, sm.in_bin. Empties the bins.
  __device__ void find_bin(int wanted) {
    constexpr int kOwn = Config::kBins / Config::kThreads;  // from the top
    const int first = Config::kBins - (thread + 1) * kOwn;
    __syncthreads();
    uint32_t own[kOwn], sum = 0;
#pragma unroll
    for (int i = 0; i < kOwn; i += 4) {
      uint4& piece = *reinterpret_cast<uint4*>(&sm.bins[first + i]);
      const uint4 v = piece;
      own[i] = v.x;
      own[i + 1] = v.y;
      own[i + 2] = v.z;
      own[i + 3] = v.w;
      sum += v.x + v.y + v.z + v.w;
      piece = make_uint4(0, 0, 0, 0);
    }
    int above = static_cast<int>(scan(sum));
    if (above < wanted && wanted <= above + static_cast<int>(sum)) {
#pragma unroll
      for (int i = kOwn - 1; i >= 0; --i) {
        const int here = static_cast<int>(own[i]);
        if (above < wanted && wanted <= above + here) {
          sm.bin = static_cast<uint32_t>(first + i);
          sm.above = static_cast<uint32_t>(above);
          sm.in_bin = own[i];
        }
        above += here;
      }
    }
    __syncthreads();
  }

  // Bins of equal width between the lowest and the highest score. Sums of scores spread well over
  // them, while the upper bits of floats of both signs take a few dozen values. The mapping is
  // monotone, so this is exact whenever few enough ranks share the bin of the need-th; else
  // (plateaus, outliers, infinities, NaN) the answer is no.
  __device__ bool by_width(int count, int need, uint32_t top, uint32_t low, Threshold& found) {
    const float low_score = score_of(low), width = score_of(top) - low_score;
    const float scale = (Config::kBins - 1) / width;
    if (!(scale > 0.f && scale < 1e30f && width < 1e30f)) return false;
    const auto bin_of = [&](uint32_t rank) {
      // The sum's unit is 1, so that its lower bits are the bin.
      constexpr float kUnit = 8388608.f;
      return __float_as_uint(fmaf(score_of(rank) - low_score, scale, kUnit)) & 0xFFFu;
    };
    for_ranks(count, [&](uint32_t rank) {
      if (rank >= low) atomicAdd(&sm.bins[bin_of(rank)], 1u);
    });
    find_bin(need);
    const uint32_t bin = sm.bin;
    const int members = static_cast<int>(sm.in_bin);
    if (members > Config::kList) return false;
    for_ranks(count, [&](uint32_t rank) {
      if (rank >= low && bin_of(rank) == bin) sm.list[atomicAdd(&sm.listed, 1u)] = rank;
    });
    found = rank_list(members, need - static_cast<int>(sm.above));
    return true;
  }

  // Radix select whose 11-bit digits start at the first bit in which ranks differ.
  __device__ Threshold by_digits(int count, int need, uint32_t top, uint32_t low) {
    int shift = 32 - __clz(static_cast<int>(top ^ low));  // ranks agree above bit `shift`
    uint32_t prefix = shift == 32 ? 0 : low >> shift;
    const auto agrees = [&](uint32_t rank) {  // a dead entry does not: live ranks have upper bits
      return rank >= low && (shift == 32 || rank >> shift == prefix);
    };
    while (shift > 0) {
      const int next = max(0, shift - Config::kBinBits);
      const uint32_t mask = (1u << (shift - next)) - 1;
      for_ranks(count, [&](uint32_t rank) {
        if (agrees(rank)) atomicAdd(&sm.bins[(rank >> next) & mask], 1u);
      });
      find_bin(need);
      need -= static_cast<int>(sm.above);
      prefix = prefix << (shift - next) | sm.bin;
      shift = next;
      const int members = static_cast<int>(sm.in_bin);
      if (shift > 0 && members <= Config::kList) {
        for_ranks(count, [&](uint32_t rank) {
          if (agrees(rank)) sm.list[atomicAdd(&sm.listed, 1u)] = rank;
        });
        return rank_list(members, need);
      }
    }
    return {prefix, need};
  }
};

}  // namespace flashdsa::indexer::sm90::select_pass
