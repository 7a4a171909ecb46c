// Packed metadata (SPEC section 2) from device tensors.
//
// All kernels are queued without looking at a result; the exact build then reads one Summary back
// (its only synchronisation), because the sizes of its outputs depend on the data. The capture-safe
// build sizes its outputs by capacity and reads nothing.
//
//   check_documents   one thread a document: every rule on the boundaries; the first rule that is
//                     broken goes to status, here and below
//   check_positions   one thread a row: every rule on the positions
//   rows              one thread a row: document by bisection, the row's fields, whether it begins
//                     a segment; nothing but empty rows when status is set
//   DeviceSelect      rows that begin a segment; valid rows
//   segments          one block: offsets by a running block scan
//   key_sources       one thread a key of the prefixes

#include <thrust/iterator/counting_iterator.h>

#include <algorithm>
#include <cub/cub.cuh>
#include <limits>

#include "core/cuda/check.h"
#include "core/device.h"
#include "core/make_tensor.h"
#include "core/scratch.h"
#include "metadata/backends.h"

namespace flashdsa::metadata::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kScanThreads = 1024;

// What the host needs to know. Device memory while it is made.
struct Summary {
  std::int32_t status;  // lowest MetadataStatus that applies; kNoError while none does
  std::int32_t segments;
  std::int32_t valid_rows;
  std::int32_t longest;  // real document length
  std::int32_t max_seqlen_q;
  std::int32_t max_seqlen_k;
  std::int32_t prefix_keys;  // segment_cu_k[S]
};

constexpr std::int32_t kNoError = std::numeric_limits<std::int32_t>::max();

// The inputs as the kernels take them.
struct Inputs {
  const std::int32_t* cu;
  const std::int32_t* padded;
  std::int64_t documents;                // N
  const std::int32_t* narrow_positions;  // of the local rows, or null
  const std::int64_t* wide_positions;    // or null; both null: row t is at t
  std::int64_t rows;                     // T_q
  const std::uint8_t* padding_mask;      // or null; any byte but 0 is padding
  std::int64_t total;                    // T_k
  bool has_max_seqlen;
  std::int64_t max_seqlen;
  bool contiguous;
  bool lenient;

  __device__ std::int64_t position(std::int64_t t) const {
    if (narrow_positions != nullptr) return narrow_positions[t];
    return wide_positions != nullptr ? wide_positions[t] : t;
  }
};

// Per-row outputs and scratch.
struct RowOutputs {
  std::int32_t* starts;
  std::int32_t* causal_lengths;
  bool* query_valid;
  bool* begins_segment;
};

__device__ void report(Summary* summary, MetadataStatus status) {
  atomicMin(&summary->status, static_cast<std::int32_t>(status));
}

__global__ void init_kernel(Summary* summary) { *summary = {kNoError, 0, 0, 0, 0, 0, 0}; }

__global__ void check_documents_kernel(Inputs in, Summary* summary) {
  const std::int64_t d = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (d == 0) {
    if (in.cu[0] != 0) report(summary, MetadataStatus::kCuSeqlensStart);
    if (in.padded[0] != 0) report(summary, MetadataStatus::kPaddedStart);
    if (in.padded[in.documents] != in.total) report(summary, MetadataStatus::kPaddedEnd);
  }
  if (d >= in.documents) return;
  // In 64 bits, so that no difference wraps.
  const std::int64_t real = std::int64_t{in.cu[d + 1]} - in.cu[d];
  const std::int64_t stored = std::int64_t{in.padded[d + 1]} - in.padded[d];
  const std::int64_t shortest = in.lenient ? 0 : 1;
  if (real < shortest) report(summary, MetadataStatus::kCuSeqlensOrder);
  if (stored < shortest) report(summary, MetadataStatus::kPaddedOrder);
  if (stored < real) report(summary, MetadataStatus::kPaddedBelowReal);
  atomicMax(&summary->longest, static_cast<std::int32_t>(min(real, std::int64_t{kNoError})));
}

__global__ void check_positions_kernel(Inputs in, Summary* summary) {
  const std::int64_t t = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (t == 0 && in.has_max_seqlen && in.max_seqlen != summary->longest) {
    report(summary, MetadataStatus::kMaxSeqlen);
  }
  if (t >= in.rows) return;
  const std::int64_t g = in.position(t);
  if (g < 0 || g >= in.total) report(summary, MetadataStatus::kPositionOutside);
  if (t == 0) return;
  const std::int64_t before = in.position(t - 1);
  if (in.contiguous && g != before + 1) report(summary, MetadataStatus::kPositionGap);
  if (g <= before) report(summary, MetadataStatus::kPositionOrder);
}

// Index of the document that holds storage position g.
__device__ std::int64_t document_of(const Inputs& in, std::int64_t g) {
  std::int64_t low = 0, high = in.documents;  // padded[low] <= g < padded[high]
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    if (in.padded[middle] <= g) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

__global__ void rows_kernel(Inputs in, const Summary* summary, RowOutputs out) {
  const std::int64_t t = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (t >= in.rows) return;
  if (summary->status != kNoError) {
    out.starts[t] = 0;
    out.causal_lengths[t] = 0;
    out.query_valid[t] = false;
    out.begins_segment[t] = false;
    return;
  }
  const std::int64_t g = in.position(t);
  const std::int64_t d = document_of(in, g);
  const std::int64_t start = in.padded[d];
  const bool masked = in.padding_mask != nullptr && in.padding_mask[t] != 0;
  const bool valid = g < start + (in.cu[d + 1] - in.cu[d]) && !masked;
  out.starts[t] = static_cast<std::int32_t>(start);
  out.causal_lengths[t] = valid ? static_cast<std::int32_t>(g + 1 - start) : 0;
  out.query_valid[t] = valid;
  out.begins_segment[t] = t == 0 || in.position(t - 1) < start;
}

// Offsets of the segments whose first rows stand in first_rows [summary->segments]; entries behind
// the last segment, up to `capacity`, repeat its end.
struct SegmentOutputs {
  std::int32_t* cu_q;     // [capacity + 1]
  std::int32_t* cu_k;     // [capacity + 1]
  std::int32_t* offsets;  // [capacity]
};

__global__ void __launch_bounds__(kScanThreads)
    segments_kernel(Inputs in, const std::int32_t* starts, const std::int32_t* first_rows,
                    std::int64_t capacity, SegmentOutputs out, Summary* summary) {
  using Scan = cub::BlockScan<std::int32_t, kScanThreads>;
  __shared__ typename Scan::TempStorage s_scan;
  const std::int64_t count = summary->segments;
  const std::int32_t end_row = count > 0 ? static_cast<std::int32_t>(in.rows) : 0;
  std::int32_t keys_before = 0;  // of all segments of earlier turns
  std::int32_t longest_q = 0, longest_k = 0;
  if (threadIdx.x == 0) out.cu_q[0] = out.cu_k[0] = 0;
  for (std::int64_t base = 0; base < capacity; base += kScanThreads) {
    const std::int64_t s = base + threadIdx.x;
    std::int32_t keys = 0, last = end_row, offset = 0;
    if (s < count) {
      const std::int32_t first = first_rows[s];
      if (s + 1 < count) last = first_rows[s + 1];
      const std::int64_t start = starts[first];
      keys = static_cast<std::int32_t>(in.position(last - 1) + 1 - start);
      offset = static_cast<std::int32_t>(in.position(first) - start);
      longest_q = max(longest_q, last - first);
      longest_k = max(longest_k, keys);
    }
    std::int32_t sum = 0, total = 0;
    Scan(s_scan).InclusiveSum(keys, sum, total);
    if (s < capacity) {
      out.cu_q[s + 1] = last;
      out.cu_k[s + 1] = keys_before + sum;
      out.offsets[s] = offset;
    }
    keys_before += total;
    __syncthreads();  // s_scan is used again
  }
  atomicMax(&summary->max_seqlen_q, longest_q);
  atomicMax(&summary->max_seqlen_k, longest_k);
  if (threadIdx.x == 0) summary->prefix_keys = keys_before;
}

// key_source_indices of `keys` entries; behind the last prefix they are -1.
__global__ void key_sources_kernel(const std::int32_t* starts, const std::int32_t* cu_q,
                                   const std::int32_t* cu_k, std::int64_t segments,
                                   std::int64_t keys, std::int64_t* sources) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= keys) return;
  if (i >= cu_k[segments]) {
    sources[i] = -1;
    return;
  }
  std::int64_t low = 0, high = segments;  // cu_k[low] <= i < cu_k[high]
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    if (cu_k[middle] <= i) {
      low = middle;
    } else {
      high = middle;
    }
  }
  sources[i] = starts[cu_q[low]] + (i - cu_k[low]);
}

__global__ void store_status_kernel(const Summary* summary, std::int32_t* status) {
  *status = summary->status == kNoError ? 0 : summary->status;
}

dim3 blocks_of(std::int64_t items) {
  return dim3(static_cast<unsigned>((items + kThreads - 1) / kThreads));
}

Inputs inputs_of(const PackedMetadataArgs& args) {
  Inputs in{};
  in.cu = args.cu_seqlens.as<std::int32_t>();
  in.padded = args.cu_seqlens_padded.value_or(args.cu_seqlens).as<std::int32_t>();
  in.documents = args.cu_seqlens.shape[0] - 1;
  in.rows = args.query_indices ? args.query_indices->shape[0] : args.total_key_tokens;
  if (args.query_indices && args.query_indices->dtype == DType::kInt32) {
    in.narrow_positions = args.query_indices->as<std::int32_t>();
  } else if (args.query_indices) {
    in.wide_positions = args.query_indices->as<std::int64_t>();
  }
  in.padding_mask = args.padding_mask ? args.padding_mask->as<std::uint8_t>() : nullptr;
  in.total = args.total_key_tokens;
  in.has_max_seqlen = args.max_seqlen.has_value();
  in.max_seqlen = args.max_seqlen.value_or(0);
  in.contiguous = args.query_mode == QueryMode::kContiguous;
  in.lenient = args.lenient;
  return in;
}

// One build: device, stream and what its steps share.
class Builder {
 public:
  Builder(const PackedMetadataArgs& args, const Runtime& runtime)
      : runtime_(runtime),
        device_(args.cu_seqlens.device),
        stream_(static_cast<cudaStream_t>(runtime.stream.handle)),
        in_(inputs_of(args)),
        capacity_(std::min(in_.documents, in_.rows)) {}

  PackedMetadata build_exact() {
    Temporaries temporaries(*this);
    PackedMetadata result = queue_rows(temporaries);
    queue_segments(temporaries, result, capacity_, temporaries.segments);
    const core::Scratch valid_rows(runtime_, bytes<std::int64_t>(in_.rows), device_);
    select(static_cast<std::int64_t*>(valid_rows.data()), result.query_valid.view().as<bool>(),
           &temporaries.summary->valid_rows, temporaries);

    Summary host{};
    core::cuda::check(
        cudaMemcpyAsync(&host, temporaries.summary, sizeof(host), cudaMemcpyDeviceToHost, stream_),
        "reading the metadata's summary");
    core::cuda::check(cudaStreamSynchronize(stream_), "waiting for the metadata's summary");
    if (host.status != kNoError) {
      result.total_key_tokens = 0;  // tells the caller, who finds the sentence
      return result;
    }
    result.segment_cu_q = copied(temporaries.segments.cu_q, DType::kInt32, host.segments + 1);
    result.segment_cu_k = copied(temporaries.segments.cu_k, DType::kInt32, host.segments + 1);
    result.q_causal_offsets = copied(temporaries.segments.offsets, DType::kInt32, host.segments);
    result.all_rows_nonempty = host.valid_rows == in_.rows;
    if (!result.all_rows_nonempty) {
      result.valid_row_indices = copied(valid_rows.data(), DType::kInt64, host.valid_rows);
    }
    result.max_seqlen_q = host.max_seqlen_q;
    result.max_seqlen_k = host.max_seqlen_k;
    if (in_.rows != in_.total) queue_key_sources(result, host.segments, host.prefix_keys);
    return result;
  }

  PackedMetadata build_capture_safe(bool key_sources) {
    Temporaries temporaries(*this);
    PackedMetadata result = queue_rows(temporaries);
    result.segment_cu_q = tensor(DType::kInt32, in_.documents + 1);
    result.segment_cu_k = tensor(DType::kInt32, in_.documents + 1);
    result.q_causal_offsets = tensor(DType::kInt32, in_.documents);
    const SegmentOutputs segments{result.segment_cu_q.view().as<std::int32_t>(),
                                  result.segment_cu_k.view().as<std::int32_t>(),
                                  result.q_causal_offsets.view().as<std::int32_t>()};
    queue_segments(temporaries, result, in_.documents, segments);
    result.max_seqlen_q = in_.rows;
    result.max_seqlen_k = in_.total;
    if (key_sources && in_.rows != in_.total) {
      queue_key_sources(result, in_.documents, in_.total);
    }
    result.status = tensor(DType::kInt32, 1);
    store_status_kernel<<<1, 1, 0, stream_>>>(temporaries.summary,
                                              result.status->view().as<std::int32_t>());
    core::cuda::check_launch("store_status_kernel", 1, 1, 0);
    return result;
  }

 private:
  // Scratch of one build.
  struct Temporaries {
    core::Scratch memory;
    Summary* summary;
    bool* begins_segment;
    std::int32_t* first_rows;
    SegmentOutputs segments;
    void* select_memory;
    std::size_t select_bytes;

    explicit Temporaries(const Builder& b)
        : memory(b.runtime_, layout(b, nullptr, *this), b.device_) {
      layout(b, memory.data(), *this);
    }

    static std::size_t layout(const Builder& b, void* base, Temporaries& t) {
      core::Carver carver(base);
      const auto rows = static_cast<std::size_t>(b.in_.rows);
      const auto capacity = static_cast<std::size_t>(b.capacity_);
      t.summary = carver.take<Summary>(1);
      t.begins_segment = carver.take<bool>(rows);
      t.first_rows = carver.take<std::int32_t>(capacity);
      t.segments.cu_q = carver.take<std::int32_t>(capacity + 1);
      t.segments.cu_k = carver.take<std::int32_t>(capacity + 1);
      t.segments.offsets = carver.take<std::int32_t>(capacity);
      t.select_bytes = b.select_bytes();
      t.select_memory = carver.take<std::byte>(t.select_bytes);
      return carver.bytes();
    }
  };

  template <typename T>
  static std::size_t bytes(std::int64_t count) {
    return static_cast<std::size_t>(count) * sizeof(T);
  }

  Tensor tensor(DType dtype, std::int64_t count) const {
    return core::make_tensor(dtype, std::span(&count, 1), device_, runtime_);
  }

  Tensor copied(const void* from, DType dtype, std::int64_t count) const {
    Tensor to = tensor(dtype, count);
    core::cuda::check(
        cudaMemcpyAsync(to.view().data, from, to.view().bytes(), cudaMemcpyDeviceToDevice, stream_),
        "copying metadata");
    return to;
  }

  std::size_t select_bytes() const {
    std::size_t needed = 0;
    core::cuda::check(cub::DeviceSelect::Flagged(
                          nullptr, needed, thrust::counting_iterator<std::int64_t>(0),
                          static_cast<const bool*>(nullptr), static_cast<std::int64_t*>(nullptr),
                          static_cast<std::int32_t*>(nullptr), in_.rows, stream_),
                      "sizing a selection of rows");
    std::size_t narrow = 0;
    core::cuda::check(cub::DeviceSelect::Flagged(
                          nullptr, narrow, thrust::counting_iterator<std::int32_t>(0),
                          static_cast<const bool*>(nullptr), static_cast<std::int32_t*>(nullptr),
                          static_cast<std::int32_t*>(nullptr), in_.rows, stream_),
                      "sizing a selection of rows");
    return std::max(needed, narrow);
  }

  // Writes the numbers of the flagged rows to `to` and their count to `count`.
  template <typename Index>
  void select(Index* to, const bool* flags, std::int32_t* count, const Temporaries& t) const {
    std::size_t size = t.select_bytes;
    core::cuda::check(
        cub::DeviceSelect::Flagged(t.select_memory, size, thrust::counting_iterator<Index>(0),
                                   flags, to, count, in_.rows, stream_),
        "selecting rows");
  }

  // Checks, then the fields of every row.
  PackedMetadata queue_rows(const Temporaries& t) {
    PackedMetadata result;
    result.total_key_tokens = in_.total;
    result.starts = tensor(DType::kInt32, in_.rows);
    result.causal_lengths = tensor(DType::kInt32, in_.rows);
    result.query_valid = tensor(DType::kBool, in_.rows);
    const RowOutputs out{result.starts.view().as<std::int32_t>(),
                         result.causal_lengths.view().as<std::int32_t>(),
                         result.query_valid.view().as<bool>(), t.begins_segment};
    init_kernel<<<1, 1, 0, stream_>>>(t.summary);
    core::cuda::check_launch("init_kernel", 1, 1, 0);
    check_documents_kernel<<<blocks_of(in_.documents), kThreads, 0, stream_>>>(in_, t.summary);
    core::cuda::check_launch("check_documents_kernel", blocks_of(in_.documents), kThreads, 0);
    check_positions_kernel<<<blocks_of(in_.rows), kThreads, 0, stream_>>>(in_, t.summary);
    core::cuda::check_launch("check_positions_kernel", blocks_of(in_.rows), kThreads, 0);
    rows_kernel<<<blocks_of(in_.rows), kThreads, 0, stream_>>>(in_, t.summary, out);
    core::cuda::check_launch("rows_kernel", blocks_of(in_.rows), kThreads, 0);
    return result;
  }

  void queue_segments(const Temporaries& t, const PackedMetadata& result, std::int64_t capacity,
                      const SegmentOutputs& out) {
    select(t.first_rows, t.begins_segment, &t.summary->segments, t);
    segments_kernel<<<1, kScanThreads, 0, stream_>>>(in_, result.starts.view().as<std::int32_t>(),
                                                     t.first_rows, capacity, out, t.summary);
    core::cuda::check_launch("segments_kernel", 1, kScanThreads, 0);
  }

  void queue_key_sources(PackedMetadata& result, std::int64_t segments, std::int64_t keys) {
    result.key_source_indices = tensor(DType::kInt64, keys);
    key_sources_kernel<<<blocks_of(keys), kThreads, 0, stream_>>>(
        result.starts.view().as<std::int32_t>(), result.segment_cu_q.view().as<std::int32_t>(),
        result.segment_cu_k.view().as<std::int32_t>(), segments, keys,
        result.key_source_indices->view().as<std::int64_t>());
    core::cuda::check_launch("key_sources_kernel", blocks_of(keys), kThreads, 0);
  }

  const Runtime& runtime_;
  Device device_;
  cudaStream_t stream_;
  Inputs in_;
  std::int64_t capacity_;  // most segments there can be
};

}  // namespace

std::string refusal(const BuildParams& params) {
  const Device device = params.args.cu_seqlens.device;
  if (device.kind != DeviceKind::kCuda) return "the tensors are not on a CUDA device";
  return core::sm90_refusal(device.index);
}

bool build(const BuildParams& params, const Runtime& runtime) {
  const core::cuda::DeviceGuard guard(params.args.cu_seqlens.device.index);
  Builder builder(params.args, runtime);
  params.result = params.args.capture_safe ? builder.build_capture_safe(params.args.key_sources)
                                           : builder.build_exact();
  return params.result.total_key_tokens > 0;
}

}  // namespace flashdsa::metadata::sm90
