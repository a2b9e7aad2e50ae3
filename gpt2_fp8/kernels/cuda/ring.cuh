// A ring of STAGES buffers in shared memory: the copy engine fills them, and other threads empty them.

// How the copy engine finds a box of a tensor (`nvrtc.tensor_map`).
struct __align__(64) TensorMap {
  u64 opaque[16];
};

// Which stage a thread is at, and the parity of its barriers there.
struct Cursor {
  int stage = 0;
  u32 parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// A barrier of some of the block's threads; 0 is __syncthreads'.
__device__ __forceinline__ void meet(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
// Make earlier writes to shared memory visible to the copy engine and the tensor cores.
__device__ __forceinline__ void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Make new barriers visible to the copy engine, and to the other blocks of a cluster.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  publish();
}
