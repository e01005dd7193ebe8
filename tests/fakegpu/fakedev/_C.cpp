// A fake accelerator for tests: torch's PrivateUse1 backend in host memory.
//
// Every kernel runs on the CPU (boxed fallback), at once and in the calling thread. What is emulated is what a GPU makes hard:
//  * streams and events with vector clocks: an access that no event, stream wait or host wait orders is reported (a race)
//  * a caching allocator's rule: memory freed while another stream may use it, without record_stream, is reported
//  * fresh memory is poisoned (all bits set: NaN), freed memory too
//  * copies from pinned memory with non_blocking=True happen late: when somebody who may see them looks
//  * a random generator of the device's own, which the CPU's seed does not reach
//  * fork after initialisation does not work in the child
//  * a clock per stream (FAKEGPU_OP_US, FAKEGPU_SYNC_US, FAKEGPU_PCIE_GBPS): the host runs ahead, and waits where it synchronises
//  * counters: kernels, host waits by operation, bytes each way, live and peak bytes
#include <torch/library.h>
#include <torch/csrc/utils/pybind.h>
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/NativeFunctions.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/DeviceGuard.h>
#include <pthread.h>
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>

namespace fk {
using Key = uint64_t;  // device << 32 | stream
using VC = std::map<Key, uint64_t>;
constexpr auto PU1 = c10::DeviceType::PrivateUse1;
constexpr int MOST = 16;

static double env_f(const char* n, double d) { const char* v = std::getenv(n); return v ? std::atof(v) : d; }
static int n_devices() { static int n = int(env_f("FAKEGPU_DEVICES", 1)); return n; }
static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Gate {  // what a stream waits for and the emulation cannot do at once: a collective with others
  std::mutex m; std::condition_variable cv; bool is_open = false;
  void open() { { std::lock_guard<std::mutex> l(m); is_open = true; } cv.notify_all(); }
  void await() { std::unique_lock<std::mutex> l(m); cv.wait(l, [this] { return is_open; }); }
  bool opened() { std::unique_lock<std::mutex> l(m); return is_open; }
};
using Gates = std::vector<std::shared_ptr<Gate>>;
struct StreamState { VC vc; double ready = 0; Gates gates; };
struct Access { Key stream; uint64_t clock; char *lo, *hi; bool write; std::string op; };
struct Pending { Key stream; uint64_t clock; std::function<void()> act; std::string what; };
struct Block { size_t size; Key stream; std::vector<Access> log; std::vector<Pending> late; std::set<Key> recorded; };
struct Event { bool recorded = false; VC vc; Key stream = 0; double ready = 0; Gates gates; };

static std::recursive_mutex& mu = *new std::recursive_mutex();
using Lock = std::lock_guard<std::recursive_mutex>;
static auto& streams = *new std::unordered_map<Key, StreamState>();
static auto& blocks = *new std::map<char*, Block>();         // device memory, by base
static auto& pinned = *new std::map<char*, size_t>();        // page-locked host memory
static auto& host_vc = *new VC();                            // what host threads have waited for (all as one)
static std::atomic<uint32_t> next_stream{1};
static auto& counts = *new std::map<std::string, uint64_t>();
static auto& sync_by = *new std::map<std::string, uint64_t>();
static uint64_t live = 0, peak = 0, total_allocs = 0;
static auto& reports = *new std::vector<std::string>();
static PyObject* hook = nullptr;
static std::atomic<bool> initialised{false}, bad_fork{false}, touched{false};
static double op_s = env_f("FAKEGPU_OP_US", 0) * 1e-6, sync_s = env_f("FAKEGPU_SYNC_US", 0) * 1e-6;
static double pcie = env_f("FAKEGPU_PCIE_GBPS", 0) * 1e9;
static bool poison = env_f("FAKEGPU_POISON", 1) != 0;
static bool detect = env_f("FAKEGPU_DETECT", 1) != 0;
static bool probing_poisons = env_f("FAKEGPU_PROBE_POISONS_FORK", 0) != 0;

static thread_local int cur_dev = 0;
static thread_local uint32_t cur_stream[MOST] = {0};
static thread_local int inside = 0;           // in a fallback: copies are the emulation's own
struct Inside { Inside() { ++inside; } ~Inside() { --inside; } };

static void in_child() { if (initialised || (probing_poisons && touched)) bad_fork = true; new (&mu) std::recursive_mutex(); }
static void init() {
  if (bad_fork) TORCH_CHECK(false, "Cannot re-initialize fakegpu in forked subprocess. To use it with multiprocessing, use 'spawn'");
  initialised = true;
}
static Key key(int d, uint32_t s) { return (Key(d) << 32) | s; }
static Key current(int d) { return key(d, cur_stream[d]); }
static std::string name(Key k) { return "dev" + std::to_string(k >> 32) + ".s" + std::to_string(uint32_t(k)); }
static void join(VC& a, const VC& b) { for (auto& [k, v] : b) { auto& x = a[k]; if (v > x) x = v; } }
static bool knows(const VC& vc, Key s, uint64_t clock) { auto f = vc.find(s); return f != vc.end() && f->second >= clock; }

static void tell(const std::string& kind, const std::string& what) {
  if (hook && !Py_IsFinalizing()) {
    py::gil_scoped_acquire gil;
    PyObject* r = PyObject_CallFunction(hook, "ss", kind.c_str(), what.c_str());
    if (!r) { PyErr_Clear(); } else { Py_DECREF(r); }
  }
}
static void report(const std::string& kind, const std::string& what) {
  { Lock l(mu); reports.push_back(kind + ": " + what); counts["report " + kind]++; }
  tell(kind, what);
}

static Gates closed(Gates all, const Gates& more) {  // each once: streams that wait for each other would have them twice as often each time
  Gates found;
  std::set<Gate*> seen;
  all.insert(all.end(), more.begin(), more.end());
  for (auto& g : all) if (!g->opened() && seen.insert(g.get()).second) found.push_back(g);
  return found;
}
static void await(const Gates& gates) { for (auto& g : gates) g->await(); }
static void await_gates(Key s) {  // without the lock; whatever runs on this stream from now on runs behind them
  Gates found;
  { Lock l(mu); found = streams[s].gates; }
  if (found.empty()) return;
  await(found);
  Lock l(mu);
  auto& all = streams[s].gates;
  Gates left;
  for (auto& g : all) { std::lock_guard<std::mutex> q(g->m); if (!g->is_open) left.push_back(g); }
  all.swap(left);
}
static uint64_t launch(Key s, double seconds) {  // with the lock
  auto& st = streams[s];
  join(st.vc, host_vc);
  st.ready = std::max(now(), st.ready) + seconds;
  return ++st.vc[s];
}
// What a late copy holds may be Python's, whose lock must not be asked for while this one is held: it dies later.
using Dead = std::vector<Pending>;
static void run_late(Block& b, Key s, std::vector<std::string>& out, Dead& dead) {
  auto& vc = streams[s].vc;
  std::vector<Pending> rest;
  for (auto& p : b.late) {
    if (p.stream == s || knows(vc, p.stream, p.clock)) { p.act(); dead.push_back(p); }
    else { out.push_back(p.what + " on " + name(p.stream) + " is not awaited by " + name(s)); rest.push_back(p); }
  }
  b.late.swap(rest);
}
// An access of a kernel to device memory.
static void touch(const at::Tensor& t, Key s, uint64_t clock, bool write, const std::string& op) {
  if (!t.defined() || !t.has_storage() || t.device().type() != PU1 || t.numel() == 0) return;
  char* base = static_cast<char*>(const_cast<void*>(t.storage().data()));
  if (!base) return;
  std::vector<std::string> bad;
  Dead dead;
  {
    Lock l(mu);
    auto f = blocks.find(base);
    if (f == blocks.end()) return;
    auto& b = f->second;
    run_late(b, s, bad, dead);
    if (detect) {
      int64_t span = 1;
      for (int64_t i = 0; i < t.dim(); ++i) span += (t.size(i) - 1) * t.stride(i);
      char* lo = static_cast<char*>(t.data_ptr());
      char* hi = lo + span * t.element_size();
      auto& vc = streams[s].vc;
      for (auto& r : b.log)
        if (r.stream != s && (write || r.write) && r.lo < hi && lo < r.hi && !knows(vc, r.stream, r.clock))
          bad.push_back(op + (write ? " writes" : " reads") + " on " + name(s) + " what " + r.op + (r.write ? " wrote" : " read") + " on " + name(r.stream));
      std::vector<Access> kept;
      for (auto& r : b.log)
        if (!((r.stream == s || knows(vc, r.stream, r.clock)) && lo <= r.lo && r.hi <= hi && (write || !r.write) && r.stream == s)) kept.push_back(r);
      kept.push_back({s, clock, lo, hi, write, op});
      if (kept.size() > 512) kept.erase(kept.begin(), kept.begin() + 256);
      b.log.swap(kept);
    }
  }
  for (auto& w : bad) report("race", w);
}
static auto& to_host = *new std::vector<Pending>();  // copies to pinned memory, which hold nothing until the host has waited
static void arrive(Dead& dead) {  // with the lock
  std::vector<Pending> rest;
  for (auto& p : to_host) { if (knows(host_vc, p.stream, p.clock)) { p.act(); dead.push_back(p); } else rest.push_back(p); }
  to_host.swap(rest);
}
static void flush_late(Key s, Dead& dead) {  // with the lock
  for (auto& [p, b] : blocks) {
    std::vector<Pending> rest;
    for (auto& l : b.late) { if (l.stream == s) { l.act(); dead.push_back(l); } else rest.push_back(l); }
    b.late.swap(rest);
  }
}
static void host_sync(Key s, const std::string& why) {
  await_gates(s);
  double until;
  Dead dead;
  {
    Lock l(mu);
    join(host_vc, streams[s].vc);
    arrive(dead);
    flush_late(s, dead);
    until = streams[s].ready;
    counts["host waits"]++;
    sync_by[why]++;
  }
  tell("sync", why);
  double left = until - now() + sync_s;
  if (left > 0) std::this_thread::sleep_for(std::chrono::duration<double>(left));
}

// --- memory
static void release(void* p) {
  char* base = static_cast<char*>(p);
  std::vector<std::string> bad;
  Dead dead;
  {
    Lock l(mu);
    auto f = blocks.find(base);
    if (f == blocks.end()) return;
    auto& b = f->second;
    VC vc = streams[b.stream].vc;
    join(vc, host_vc);
    if (detect)
      for (auto& r : b.log)
        if (r.stream != b.stream && !b.recorded.count(r.stream) && !knows(vc, r.stream, r.clock))
          bad.push_back("freed to " + name(b.stream) + " while " + r.op + " may still " + (r.write ? "write" : "read") + " it on " + name(r.stream) + " (no record_stream), " + std::to_string(b.size) + " bytes");
    for (auto& q : b.late) counts["late copies that nobody awaited"]++;
    dead.swap(b.late);
    live -= b.size;
    if (poison && b.size) std::memset(base, 0xEE, b.size);
    blocks.erase(f);
  }
  std::free(base);
  for (auto& w : bad) report("free", w);
}
struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    init();
    c10::Device d(PU1, cur_dev);
    if (!n) return {nullptr, nullptr, &release, d};
    void* p = nullptr;
    TORCH_CHECK(!posix_memalign(&p, 512, (n + 511) / 512 * 512), "fakegpu out of memory");
    if (poison) std::memset(p, 0xFF, n);
    static uint64_t limit = uint64_t(env_f("FAKEGPU_MEMORY_MIB", 0)) << 20;
    Lock l(mu);
    if (limit && live + n > limit) { std::free(p); TORCH_CHECK_WITH(OutOfMemoryError, false, "fakegpu out of memory. Tried to allocate ", n, " bytes, ", live, " are in use of ", limit); }
    Block b{n, current(cur_dev), {}, {}, {}};
    blocks[static_cast<char*>(p)] = b;
    live += n; peak = std::max(peak, live); total_allocs++;
    return {p, p, &release, d};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* dest, const void* src, std::size_t count) const override { std::memcpy(dest, src, count); }
};
static DeviceAllocator device_allocator;
static void unpin(void* p) { Lock l(mu); pinned.erase(static_cast<char*>(p)); std::free(p); }
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* p = nullptr;
    TORCH_CHECK(!posix_memalign(&p, 512, (n + 511) / 512 * 512 + 512), "out of memory");
    Lock l(mu);
    pinned[static_cast<char*>(p)] = n; counts["pinned allocations"]++; counts["pinned bytes"] += n;
    return {p, p, &unpin, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* dest, const void* src, std::size_t count) const override { std::memcpy(dest, src, count); }
};
static PinnedAllocator pinned_allocator;
static bool is_pinned(const void* q) {
  Lock l(mu);
  auto p = static_cast<char*>(const_cast<void*>(q));
  auto f = pinned.upper_bound(p);
  if (f == pinned.begin()) return false;
  --f;
  return p < f->first + f->second;
}

// --- guard
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return PU1; }
  c10::Device exchangeDevice(c10::Device d) const override { auto old = getDevice(); setDevice(d); return old; }
  c10::Device getDevice() const override { return c10::Device(PU1, cur_dev); }
  void setDevice(c10::Device d) const override { if (d.index() >= 0) { TORCH_CHECK(d.index() < n_devices(), "fakegpu: no device ", int(d.index())); cur_dev = d.index(); } }
  void uncheckedSetDevice(c10::Device d) const noexcept override { if (d.index() >= 0) cur_dev = d.index(); }
  static int at(c10::Device d) { return d.index() < 0 ? cur_dev : d.index(); }
  static c10::Stream stream(int d, uint32_t s) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(PU1, d), s); }
  c10::Stream getStream(c10::Device d) const override { return stream(at(d), cur_stream[at(d)]); }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream(at(d), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return stream(at(d), next_stream++); }
  c10::Stream getNewStream(c10::Device d, int) const override { return stream(at(d), next_stream++); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = getStream(s.device());
    cur_stream[at(s.device())] = uint32_t(s.id());
    return old;
  }
  static Key of(const c10::Stream& s) { return key(at(s.device()), uint32_t(s.id())); }
  void destroyEvent(void* e, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(e); }
  void record(void** e, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock l(mu);
    if (!*e) *e = new Event();
    auto ev = static_cast<Event*>(*e);
    launch(of(s), 0);
    ev->recorded = true; ev->vc = streams[of(s)].vc; ev->stream = of(s); ev->ready = streams[of(s)].ready; ev->gates = streams[of(s)].gates = closed(std::move(streams[of(s)].gates), {});
    counts["events recorded"]++;
  }
  void block(void* e, const c10::Stream& s) const override {
    Lock l(mu);
    if (!e) return;
    auto ev = static_cast<Event*>(e);
    if (!ev->recorded) return;
    auto& st = streams[of(s)];
    join(st.vc, ev->vc);
    st.ready = std::max(st.ready, ev->ready);
    st.gates = closed(std::move(st.gates), ev->gates);
    counts["events awaited by streams"]++;
  }
  bool queryEvent(void* e) const override {
    if (!e) return true;
    auto ev = static_cast<Event*>(e);
    for (auto& g : ev->gates) if (!g->opened()) return false;
    Dead dead;
    Lock l(mu);
    if (std::all_of(ev->vc.begin(), ev->vc.end(), [](auto& one) { return knows(host_vc, one.first, one.second); })) return true;
    if (op_s <= 0 || ev->ready > now()) return false;  // without a clock a device is as late as it can be
    join(host_vc, ev->vc);  // who is told that it is over may read what it has left
    arrive(dead);
    flush_late(ev->stream, dead);
    return true;
  }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    TORCH_CHECK(queryEvent(a) && queryEvent(b), "an event has not come yet, so no time has passed between them");
    return (static_cast<Event*>(b)->ready - static_cast<Event*>(a)->ready) * 1000;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return n_devices(); }
  bool queryStream(const c10::Stream& s) const override { Lock l(mu); return streams[of(s)].ready <= now(); }
  void synchronizeStream(const c10::Stream& s) const override { host_sync(of(s), "stream.synchronize"); }
  void synchronizeEvent(void* e) const override {
    if (!e) return;
    auto ev = static_cast<Event*>(e);
    await(ev->gates);
    double until;
    Dead dead;
    { Lock l(mu); join(host_vc, ev->vc); until = ev->ready; counts["host waits"]++; sync_by["event.synchronize"]++; arrive(dead); flush_late(ev->stream, dead); }
    double left = until - now();
    if (left > 0) std::this_thread::sleep_for(std::chrono::duration<double>(left));
  }
  void synchronizeDevice(const c10::DeviceIndex d) const override {
    std::vector<Key> all;
    { Lock l(mu); for (auto& [k, v] : streams) if (int(k >> 32) == (d < 0 ? cur_dev : d)) all.push_back(k); }
    if (all.empty()) all.push_back(current(cur_dev));
    for (auto k : all) host_sync(k, "synchronize");
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override {
    Lock l(mu);
    auto f = blocks.find(static_cast<char*>(p.get()));
    if (f != blocks.end()) f->second.recorded.insert(of(s));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// --- generators
struct Gen final : c10::GeneratorImpl {
  at::Generator inner = at::detail::createCPUGenerator();
  uint64_t drawn = 0;
  explicit Gen(c10::DeviceIndex d) : c10::GeneratorImpl{c10::Device(PU1, d), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)} {}
  at::CPUGeneratorImpl* cpu() const { return at::check_generator<at::CPUGeneratorImpl>(inner); }
  void set_current_seed(uint64_t s) override { cpu()->set_current_seed(s); drawn = 0; counts["device generator seeded"]++; }
  void set_offset(uint64_t o) override { drawn = o; }
  uint64_t get_offset() const override { return drawn; }
  uint64_t current_seed() const override { return cpu()->current_seed(); }
  uint64_t seed() override { drawn = 0; return cpu()->seed(); }
  void set_state(const c10::TensorImpl& s) override { cpu()->set_state(s); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu()->get_state(); }
  Gen* clone_impl() const override { auto g = new Gen(device().index()); g->inner = inner.clone(); g->drawn = drawn; return g; }
};
static std::vector<at::Generator>& generators() {
  static auto& all = *new std::vector<at::Generator>([] { std::vector<at::Generator> v; for (int i = 0; i < n_devices(); ++i) { v.push_back(at::make_generator<Gen>(i)); v.back().seed(); } return v; }());
  return all;
}

// --- hooks
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { touched = true; return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return initialised && !bad_fork; }
  c10::DeviceIndex deviceCount() const override { touched = true; return n_devices(); }
  void setCurrentDevice(c10::DeviceIndex d) const override { init(); cur_dev = d; }
  c10::DeviceIndex getCurrentDevice() const override { return cur_dev; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override { auto o = cur_dev; cur_dev = d; return o; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { auto o = cur_dev; if (d >= 0) cur_dev = d; return o; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override { return generators()[d < 0 ? cur_dev : d]; }
  at::Generator getNewGenerator(c10::DeviceIndex d) const override { return at::make_generator<Gen>(d < 0 ? cur_dev : d); }
  at::Device getDeviceFromPtr(void*) const override { return at::Device(PU1, cur_dev); }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  c10::Allocator* getPinnedMemoryAllocator() const override { init(); return &pinned_allocator; }
  void init() const override { fk::init(); }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    auto p = device_allocator.allocate(n);
    if (s.data() && p.get()) std::memcpy(p.get(), s.data(), std::min(n, s.nbytes()));
    s.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(p));
    s.unsafeGetStorageImpl()->set_nbytes(n);
  }
};
static Hooks hooks;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &device_allocator);

// --- kernels
static at::Tensor as_cpu(const at::Tensor& t) {  // the same memory as a tensor of the CPU
  if (!t.defined() || t.device().type() != PU1) return t;
  auto o = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  if (!t.numel()) return at::empty_strided(t.sizes(), t.strides(), o);
  auto r = at::from_blob(t.data_ptr(), t.sizes(), t.strides(), o);
  if (t.is_conj()) r = r.conj();
  if (t.is_neg()) r = r._neg_view();
  return r;
}
static Key stream_of(const at::Tensor& t) { return current(t.device().index()); }
static at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> mf) {
  c10::DeviceGuard g(device && device->index() >= 0 ? *device : at::Device(PU1, cur_dev));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype.value_or(c10::typeMetaToScalarType(c10::get_default_dtype())), mf);
}
static at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard g(device && device->index() >= 0 ? *device : at::Device(PU1, cur_dev));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype.value_or(c10::typeMetaToScalarType(c10::get_default_dtype())));
}
static at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  if (!self.numel()) return dst;
  if (inside) { as_cpu(dst).copy_(as_cpu(self)); return dst; }
  init();
  bool from = self.device().type() == PU1, to = dst.device().type() == PU1;
  Key s = stream_of(from ? self : dst);
  size_t bytes = self.nbytes();
  uint64_t clock;
  await_gates(s);
  { Lock l(mu); clock = launch(s, op_s + (from != to && pcie > 0 ? bytes / pcie : 0)); counts["kernels"]++; if (from && to) counts["op copy_"]++; }
  if (from && to) {
    touch(self, s, clock, false, "copy"); touch(dst, s, clock, true, "copy");
    Inside i; as_cpu(dst).copy_(as_cpu(self));
  } else if (to) {
    { Lock l(mu); counts["h2d copies"]++; counts["h2d bytes"] += bytes; }
    bool late = non_blocking && is_pinned(self.data_ptr());
    touch(dst, s, clock, true, "copy from host");
    if (late) {
      at::Tensor src = self, into = as_cpu(dst);  // memory of dst lives as long as its block
      Lock l(mu);
      counts["h2d copies that are asynchronous"]++;
      auto f = blocks.find(static_cast<char*>(const_cast<void*>(dst.storage().data())));
      if (f != blocks.end()) f->second.late.push_back({s, clock, [src, into]() mutable { Inside i; into.copy_(src); }, "a copy from pinned memory"});
    } else {
      { Inside i; as_cpu(dst).copy_(self); }
      if (!non_blocking) host_sync(s, "copy to device"); else { Lock l(mu); counts["h2d copies from pageable memory"]++; }
    }
  } else {
    { Lock l(mu); counts["d2h copies"]++; counts["d2h bytes"] += bytes; }
    touch(self, s, clock, false, "copy to host");
    if (non_blocking && is_pinned(dst.data_ptr()) && dst.is_contiguous()) {
      at::Tensor kept, into = dst;
      { Inside i; kept = as_cpu(self).clone(); }
      std::memset(dst.data_ptr(), 0xFB, dst.nbytes());
      Lock l(mu);
      counts["d2h copies that are asynchronous"]++;
      to_host.push_back({s, clock, [kept, into]() mutable { Inside i; into.copy_(kept); }, "a copy to pinned memory"});
      return dst;
    }
    host_sync(s, "copy to host");
    Inside i; const_cast<at::Tensor&>(dst).copy_(as_cpu(self));
  }
  return dst;
}
static at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  if (self.sizes() != dst.sizes()) at::native::resize_(dst, self.sizes(), std::nullopt);
  return copy_from(self, dst, false);
}
static at::Scalar local_scalar(const at::Tensor& self) {
  if (inside) return as_cpu(self).item();
  Key s = stream_of(self);
  uint64_t clock;
  await_gates(s);
  { Lock l(mu); clock = launch(s, op_s); }
  touch(self, s, clock, false, "item");
  host_sync(s, "item");
  Inside i;
  return as_cpu(self).item();
}
static void record_stream(at::Tensor& self, at::Stream s) {
  Lock l(mu);
  auto f = blocks.find(static_cast<char*>(const_cast<void*>(self.storage().data())));
  if (f != blocks.end()) f->second.recorded.insert(Guard::of(s));
}
static at::Tensor to_device(const at::Tensor& t, int d) {  // inside
  if (!t.defined()) return t;
  auto r = at::empty_strided(t.sizes(), t.strides(), t.options().device(at::Device(PU1, d)));
  if (t.numel()) as_cpu(r).copy_(t);
  return r;
}
struct Op {  // a kernel that is written here: accesses, time
  Key s; uint64_t clock; std::string name;
  Op(const at::Tensor& like, std::string n) : s(stream_of(like)), name(std::move(n)) { init(); await_gates(s); Lock l(mu); clock = launch(s, op_s); counts["kernels"]++; counts["op " + name]++; }
  void reads(const at::Tensor& t) { touch(t, s, clock, false, name); }
  void reads(const std::optional<at::Tensor>& t) { if (t) reads(*t); }
  void writes(const at::Tensor& t) { touch(t, s, clock, true, name); }
  void writes(const std::optional<at::Tensor>& t) { if (t) writes(*t); }
};
static std::optional<at::Tensor> as_cpu(const std::optional<at::Tensor>& t) { return t && t->defined() ? std::optional<at::Tensor>(as_cpu(*t)) : std::nullopt; }
static std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(const at::Tensor& x, const std::optional<at::Tensor>& w, const std::optional<at::Tensor>& b, const std::optional<at::Tensor>& m, const std::optional<at::Tensor>& v, bool training, double momentum, double eps) {
  Op o(x, "native_batch_norm");
  o.reads(x); o.reads(w); o.reads(b); o.reads(m); o.reads(v);
  if (training) { o.writes(m); o.writes(v); }
  Inside i;
  auto [y, a, c] = at::native_batch_norm(as_cpu(x), as_cpu(w), as_cpu(b), as_cpu(m), as_cpu(v), training, momentum, eps);
  auto d = x.device().index();
  auto r = std::make_tuple(to_device(y, d), to_device(a, d), to_device(c, d));
  o.writes(std::get<0>(r)); o.writes(std::get<1>(r)); o.writes(std::get<2>(r));
  return r;
}
static at::Tensor conv(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b, at::IntArrayRef st, at::IntArrayRef pad, at::IntArrayRef dil, bool tr, at::IntArrayRef op, int64_t g) {
  Op o(x, "convolution"); o.reads(x); o.reads(w); o.reads(b);
  Inside i;
  auto r = to_device(at::convolution(as_cpu(x), as_cpu(w), as_cpu(b), st, pad, dil, tr, op, g), x.device().index());
  o.writes(r);
  return r;
}
static std::tuple<at::Tensor, at::Tensor, at::Tensor> conv_backward(const at::Tensor& gy, const at::Tensor& x, const at::Tensor& w, at::IntArrayRef st, at::IntArrayRef pad, at::IntArrayRef dil, bool tr, at::IntArrayRef op, int64_t g, std::array<bool, 3> mask) {
  Op o(x, "convolution_backward"); o.reads(gy); o.reads(x); o.reads(w);
  Inside i;
  std::vector<int64_t> bias{tr ? w.size(1) * g : w.size(0)};
  auto [a, c, e] = at::convolution_backward(as_cpu(gy), as_cpu(x), as_cpu(w), at::IntArrayRef(bias), st, pad, dil, tr, op, g, mask);
  auto d = x.device().index();
  auto r = std::make_tuple(to_device(a, d), to_device(c, d), to_device(e, d));
  for (auto* t : {&std::get<0>(r), &std::get<1>(r), &std::get<2>(r)}) if (t->defined()) o.writes(*t);
  return r;
}
static int64_t sdp_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) { return 0; }
static at::Tensor view(const at::Tensor& t, c10::SymIntArrayRef s) { return at::native::view(t, C10_AS_INTARRAYREF_SLOW(s)); }
static at::Tensor as_strided(const at::Tensor& t, c10::SymIntArrayRef s, c10::SymIntArrayRef st, std::optional<c10::SymInt> off) { return at::native::as_strided_tensorimpl(t, C10_AS_INTARRAYREF_SLOW(s), C10_AS_INTARRAYREF_SLOW(st), off ? std::optional<int64_t>(off->expect_int()) : std::nullopt); }
static at::Tensor reshape_alias(const at::Tensor& t, c10::SymIntArrayRef s, c10::SymIntArrayRef st) { return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(s), C10_AS_INTARRAYREF_SLOW(st)); }
static const at::Tensor& resize(const at::Tensor& t, c10::SymIntArrayRef s, std::optional<at::MemoryFormat> mf) { c10::DeviceGuard g(t.device()); return at::native::resize_(t, C10_AS_INTARRAYREF_SLOW(s), mf); }
static at::Tensor& set_storage(at::Tensor& t, at::Storage src, c10::SymInt off, c10::SymIntArrayRef s, c10::SymIntArrayRef st) { return at::native::set_storage_cpu_(t, src, off.expect_int(), C10_AS_INTARRAYREF_SLOW(s), C10_AS_INTARRAYREF_SLOW(st)); }
static at::Tensor& set_source(at::Tensor& t, at::Storage src) { return at::native::set_(t, src); }
static at::Tensor& set_tensor(at::Tensor& t, const at::Tensor& src) { return at::native::set_tensor_(t, src); }
static at::Tensor unfold(const at::Tensor& t, int64_t d, int64_t s, int64_t st) { return at::native::unfold(t, d, s, st); }

// As between the CPU and CUDA: module.to(device) keeps the parameters, and optimizers that were made before stay right.
static bool compatible(const at::Tensor&, const at::Tensor&) { return true; }

static std::recursive_mutex draw_mu;
static bool waits(const std::string& n) {  // operations of which a GPU tells the host something: it waits
  static const std::set<std::string> all{"aten::equal", "aten::is_nonzero", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave", "aten::allclose", "aten::is_set_to"};
  return all.count(n) > 0;
}
static void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (inside) { at::native::cpu_fallback(op, stack, true); return; }
  init();
  const auto& schema = op.schema();
  const std::string& n = schema.name();
  const auto args = schema.arguments().size();
  const auto first = stack->size() - args;
  int d = cur_dev;
  std::vector<std::pair<at::Tensor, bool>> used;
  std::optional<Gen*> given;
  bool none_given = false;
  for (size_t i = 0; i < args; ++i) {
    auto& v = (*stack)[first + i];
    auto* about = schema.arguments()[i].alias_info();
    bool w = about && about->isWrite();
    auto add = [&](const at::Tensor& t) { if (t.defined() && t.device().type() == PU1) { used.emplace_back(t, w); d = t.device().index(); } };
    if (v.isTensor()) add(v.toTensor());
    else if (v.isTensorList()) for (const at::Tensor& t : v.toTensorVector()) add(t);
    else if (v.isList()) { for (const c10::IValue& e : v.toListRef()) if (e.isTensor()) add(e.toTensor()); }
    else if (v.isGenerator()) {
      auto g = v.toGenerator();
      if (g.defined() && g.device().type() == PU1) { given = static_cast<Gen*>(g.unsafeGetGeneratorImpl()); v = c10::IValue((*given)->inner); }
    }
  }
  Key s = current(d);
  uint64_t clock;
  await_gates(s);
  { Lock l(mu); clock = launch(s, op_s); counts["kernels"]++; counts["op " + n.substr(6)]++; }
  for (auto& [t, w] : used) { touch(t, s, clock, w, n); }
  bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
  {
    Inside i;
    if (draws && !given) {
      std::lock_guard<std::recursive_mutex> l(draw_mu);
      auto* mine = static_cast<Gen*>(generators()[d].unsafeGetGeneratorImpl());
      auto* cpu = at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator());
      auto engine = cpu->engine(); auto f = cpu->next_float_normal_sample(); auto g = cpu->next_double_normal_sample();
      cpu->set_engine(mine->cpu()->engine()); cpu->set_next_float_normal_sample(std::nullopt); cpu->set_next_double_normal_sample(std::nullopt);
      at::native::cpu_fallback(op, stack, true);
      mine->cpu()->set_engine(cpu->engine()); mine->drawn += 4;
      cpu->set_engine(engine); cpu->set_next_float_normal_sample(f); cpu->set_next_double_normal_sample(g);
      counts["draws of the device's generator"]++;
    } else {
      at::native::cpu_fallback(op, stack, true);
      if (given) (*given)->drawn += 4;
    }
  }
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    auto& v = (*stack)[i];
    if (v.isTensor()) touch(v.toTensor(), s, clock, true, n);
    else if (v.isTensorList()) for (const at::Tensor& t : v.toTensorVector()) touch(t, s, clock, true, n);
  }
  if (waits(n)) host_sync(s, n.substr(6));
}
}  // namespace fk

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fk::fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &fk::empty);
  m.impl("empty_strided", &fk::empty_strided);
  m.impl("_copy_from", &fk::copy_from);
  m.impl("_copy_from_and_resize", &fk::copy_from_and_resize);
  m.impl("_local_scalar_dense", &fk::local_scalar);
  m.impl("record_stream", &fk::record_stream);
  m.impl("native_batch_norm", &fk::batch_norm);
  m.impl("convolution_overrideable", &fk::conv);
  m.impl("convolution_backward_overrideable", &fk::conv_backward);
  m.impl("_fused_sdp_choice", &fk::sdp_choice);
  m.impl("view", &fk::view);
  m.impl("as_strided", &fk::as_strided);
  m.impl("_reshape_alias", &fk::reshape_alias);
  m.impl("resize_", &fk::resize);
  m.impl("set_.source_Storage", &fk::set_source);
  m.impl("set_.source_Storage_storage_offset", &fk::set_storage);
  m.impl("set_.source_Tensor", &fk::set_tensor);
  m.impl("unfold", &fk::unfold);
  m.impl("_has_compatible_shallow_copy_type", &fk::compatible);
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("_has_compatible_shallow_copy_type", &fk::compatible); }

// Autocast as CUDA has it.
#define FK_LOW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FK_HIGH(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
  AT_FORALL_LOWER_PRECISION_FP(FK_LOW)
  AT_FORALL_FP32(FK_HIGH)
}

PYBIND11_MODULE(_C, m) {
  at::RegisterPrivateUse1HooksInterface(&fk::hooks);
  pthread_atfork(nullptr, nullptr, &fk::in_child);
  m.def("init", [] { fk::init(); });
  m.def("is_initialized", [] { return fk::initialised && !fk::bad_fork; });
  m.def("is_in_bad_fork", [] { return fk::bad_fork.load(); });
  m.def("device_count", [] { fk::touched = true; return fk::n_devices(); });
  m.def("current_device", [] { return fk::cur_dev; });
  m.def("set_device", [](int d) { fk::init(); fk::cur_dev = d; });
  m.def("default_generator", [](int d) { return fk::generators().at(d); });
  m.def("synchronize", [](int d) { fk::init(); fk::Guard().synchronizeDevice(d); }, py::call_guard<py::gil_scoped_release>());
  m.def("memory", [] { fk::Lock l(fk::mu); return std::make_tuple(fk::live, fk::peak, fk::total_allocs, fk::blocks.size()); });
  m.def("reset_peak", [] { fk::Lock l(fk::mu); fk::peak = fk::live; });
  m.def("counts", [] { fk::Lock l(fk::mu); auto c = fk::counts; for (auto& [k, v] : fk::sync_by) c["wait " + k] = v; return c; });
  m.def("reset_counts", [] { fk::Lock l(fk::mu); fk::counts.clear(); fk::sync_by.clear(); });
  m.def("reports", [] { fk::Lock l(fk::mu); auto r = fk::reports; return r; });
  m.def("clear_reports", [] { fk::Lock l(fk::mu); fk::reports.clear(); });
  m.def("set_hook", [](py::object f) { fk::hook = f.is_none() ? nullptr : f.release().ptr(); });
  py::class_<fk::Gate, std::shared_ptr<fk::Gate>>(m, "Gate").def(py::init<>()).def("open", &fk::Gate::open, py::call_guard<py::gil_scoped_release>()).def("wait", &fk::Gate::await, py::call_guard<py::gil_scoped_release>());
  m.def("gate", [](int device, int64_t stream, std::shared_ptr<fk::Gate> g) { fk::Lock l(fk::mu); fk::streams[fk::key(device, uint32_t(stream))].gates.push_back(g); });
  m.def("gates", [](int device, int64_t stream) { fk::Lock l(fk::mu); return fk::streams[fk::key(device, uint32_t(stream))].gates; });
  m.def("alias", [](const at::Tensor& t) { return fk::as_cpu(t); });
  m.def("kernel", [](int device, int64_t stream, const std::vector<at::Tensor>& reads, const std::vector<at::Tensor>& writes, const std::string& name) {
    auto s = fk::key(device, uint32_t(stream));
    uint64_t clock;
    { fk::Lock l(fk::mu); clock = fk::launch(s, 0); fk::counts["op " + name]++; }
    for (auto& t : reads) fk::touch(t, s, clock, false, name);
    for (auto& t : writes) fk::touch(t, s, clock, true, name);
  });
  m.def("configure", [](double op_us, double sync_us, double gbps) { fk::op_s = op_us * 1e-6; fk::sync_s = sync_us * 1e-6; fk::pcie = gbps * 1e9; });
}
