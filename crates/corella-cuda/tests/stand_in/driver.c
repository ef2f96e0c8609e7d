// A driver that computes nothing and checks its use: memory, streams and graphs are real objects of the host, kernels
// are not run. An error that a GPU would return, or not notice until later, ends the process here.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
typedef unsigned long long Address;

enum { SHARED_BYTES = 232448, TOTAL_BYTES = 1 << 30 };
enum Kind { DEVICE, PINNED, STREAM, EVENT, MODULE, FUNCTION, GRAPH, EXECUTABLE };

struct Object {
    struct Object* next;
    enum Kind kind;
    // The memory, or the module of a function.
    char* base;
    size_t len;
    // The parameter of this function begins with tensor maps.
    int takes_maps;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct Object* objects;
static int num_contexts;
static long num_launches, num_cluster_launches, num_graph_launches;
static size_t allocated;
static void* capturing;
static __thread void* current;
static char the_context;

#define FAIL(...) (fprintf(stderr, "driver: %s: ", __func__), fprintf(stderr, __VA_ARGS__), fprintf(stderr, "\n"), abort())
#define REQUIRE(condition) ((condition) ? (void)0 : FAIL("%s does not hold", #condition))
#define IN_CONTEXT REQUIRE(current == &the_context)

static struct Object* add(enum Kind kind, void* base, size_t len) {
    struct Object* object = calloc(1, sizeof *object);
    *object = (struct Object){NULL, kind, base, len, 0};
    pthread_mutex_lock(&lock);
    object->next = objects;
    objects = object;
    pthread_mutex_unlock(&lock);
    return object;
}

static int lives(void* which, enum Kind kind) {
    pthread_mutex_lock(&lock);
    struct Object* object = objects;
    while (object && object != which) object = object->next;
    pthread_mutex_unlock(&lock);
    return object && object->kind == kind;
}

static void end(void* which, enum Kind kind) {
    pthread_mutex_lock(&lock);
    struct Object** at = &objects;
    while (*at && *at != which) at = &(*at)->next;
    struct Object* object = *at;
    if (!object || object->kind != kind) FAIL("nothing of kind %d is there", kind);
    *at = object->next;
    pthread_mutex_unlock(&lock);
    free(object);
}

static struct Object* memory_at(Address address, size_t len) {
    pthread_mutex_lock(&lock);
    struct Object* object = objects;
    for (; object; object = object->next) {
        Address base = (Address)object->base;
        if (object->kind <= PINNED && address >= base && address + len <= base + object->len) break;
    }
    pthread_mutex_unlock(&lock);
    return object;
}

// The number of live objects, including contexts.
long stand_in_num_live(void) {
    long num = num_contexts;
    for (struct Object* object = objects; object; object = object->next) {
        if (object->kind != FUNCTION) num++;
    }
    return num;
}
long stand_in_num_launches(void) { return num_launches; }
long stand_in_num_cluster_launches(void) { return num_cluster_launches; }
long stand_in_num_graph_launches(void) { return num_graph_launches; }

Result cuInit(unsigned flags) { return flags; }
Result cuDriverGetVersion(int* version) { return *version = 13000, 0; }
Result cuDeviceGetCount(int* count) { return *count = 1, 0; }
Result cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
Result cuDeviceGetName(char* name, int len, int device) { return snprintf(name, len, "stand-in %d", device), 0; }
Result cuDeviceTotalMem_v2(size_t* bytes, int device) {
    REQUIRE(device == 0);
    *bytes = (size_t)80 << 30;
    return 0;
}
Result cuDeviceGetAttribute(int* value, int attribute, int device) {
    REQUIRE(device == 0);
    switch (attribute) {
        case 75: *value = 9; break;              // compute capability, major
        case 76: *value = 0; break;              // and minor
        case 16: *value = 132; break;            // multiprocessors
        case 97: *value = SHARED_BYTES; break;   // shared memory of a block
        default: FAIL("attribute %d", attribute);
    }
    return 0;
}
Result cuDevicePrimaryCtxRetain(void** context, int device) {
    REQUIRE(device == 0);
    return num_contexts++, *context = &the_context, 0;
}
Result cuDevicePrimaryCtxRelease_v2(int device) {
    REQUIRE(device == 0 && num_contexts > 0);
    return num_contexts--, 0;
}
Result cuCtxSetCurrent(void* context) {
    REQUIRE(num_contexts > 0);
    return current = context, 0;
}
// NVRTC asks for this table, and works without it.
Result cuGetExportTable(const void** table, const void* id) { return (void)id, *table = NULL, 500; }
Result cuGetErrorName(int result, const char** name) { return (void)result, *name = "STAND_IN", 0; }
Result cuGetErrorString(int result, const char** text) { return (void)result, *text = "the stand-in refuses", 0; }

Result cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
    IN_CONTEXT;
    return *free_bytes = TOTAL_BYTES - allocated, *total = TOTAL_BYTES, 0;
}
Result cuMemAlloc_v2(Address* address, size_t len) {
    IN_CONTEXT;
    REQUIRE(len > 0);
    void* base = NULL;
    if (allocated + len > TOTAL_BYTES || posix_memalign(&base, 256, len)) return 2;
    allocated += len;
    add(DEVICE, base, len);
    return *address = (Address)base, 0;
}
Result cuMemFree_v2(Address address) {
    IN_CONTEXT;
    struct Object* memory = memory_at(address, 1);
    REQUIRE(memory && memory->kind == DEVICE && (Address)memory->base == address);
    allocated -= memory->len;
    end(memory, DEVICE);
    return free((void*)address), 0;
}
Result cuMemHostAlloc(void** base, size_t len, unsigned flags) {
    IN_CONTEXT;
    REQUIRE(len > 0 && flags == 3);
    if (posix_memalign(base, 4096, len)) return 2;
    return add(PINNED, *base, len), 0;
}
Result cuMemFreeHost(void* base) {
    IN_CONTEXT;
    struct Object* memory = memory_at((Address)base, 1);
    REQUIRE(memory && memory->kind == PINNED && memory->base == base);
    end(memory, PINNED);
    return free(base), 0;
}
Result cuMemsetD8Async(Address address, unsigned char value, size_t len, void* stream) {
    IN_CONTEXT;
    REQUIRE(lives(stream, STREAM) && stream != capturing && memory_at(address, len));
    return memset((void*)address, value, len), 0;
}
Result cuMemcpyAsync(Address to, Address from, size_t len, void* stream) {
    IN_CONTEXT;
    REQUIRE(lives(stream, STREAM) && memory_at(to, len) && memory_at(from, len));
    if (stream != capturing) memmove((void*)to, (void*)from, len);
    return 0;
}

Result cuStreamCreate(void** stream, unsigned flags) {
    IN_CONTEXT;
    REQUIRE(flags == 1);
    return *stream = add(STREAM, NULL, 0), 0;
}
Result cuStreamDestroy_v2(void* stream) {
    IN_CONTEXT;
    return end(stream, STREAM), 0;
}
Result cuStreamSynchronize(void* stream) {
    IN_CONTEXT;
    REQUIRE(lives(stream, STREAM) && stream != capturing);
    return 0;
}
Result cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
    IN_CONTEXT;
    REQUIRE(lives(stream, STREAM) && lives(event, EVENT) && flags == 0);
    return 0;
}
Result cuEventCreate(void** event, unsigned flags) {
    IN_CONTEXT;
    REQUIRE(flags == 2);
    return *event = add(EVENT, NULL, 0), 0;
}
Result cuEventDestroy_v2(void* event) {
    IN_CONTEXT;
    return end(event, EVENT), 0;
}
Result cuEventRecord(void* event, void* stream) {
    IN_CONTEXT;
    REQUIRE(lives(event, EVENT) && lives(stream, STREAM));
    return 0;
}
Result cuEventQuery(void* event) {
    IN_CONTEXT;
    REQUIRE(lives(event, EVENT));
    return 0;
}
Result cuEventSynchronize(void* event) { return cuEventQuery(event); }

Result cuModuleLoadData(void** module, const void* cubin) {
    IN_CONTEXT;
    REQUIRE(!memcmp(cubin, "\177ELF", 4));
    return *module = add(MODULE, NULL, 0), 0;
}
Result cuModuleUnload(void* module) {
    IN_CONTEXT;
    return end(module, MODULE), 0;
}
Result cuModuleGetFunction(void** function, void* module, const char* name) {
    IN_CONTEXT;
    REQUIRE(lives(module, MODULE) && *name);
    struct Object* added = add(FUNCTION, module, 0);
    added->takes_maps = !strcmp(name, "linear_hopper");
    return *function = added, 0;
}
Result cuFuncGetAttribute(int* value, int attribute, void* function) {
    REQUIRE(lives(function, FUNCTION));
    switch (attribute) {
        case 0: *value = 1024; break;  // threads of a block
        case 1: *value = 0; break;     // static shared memory
        default: FAIL("attribute %d", attribute);
    }
    return 0;
}
Result cuFuncSetAttribute(void* function, int attribute, int value) {
    IN_CONTEXT;
    REQUIRE(lives(function, FUNCTION) && attribute == 8 && value <= SHARED_BYTES);
    ((struct Object*)function)->len = value;
    return 0;
}
// A tensor that kernels copy boxes of: bf16, in rows of 128 swizzled bytes.
struct TensorMap {
    Address mark, address, len, pad[13];
};
static const Address MAP_MARK = 0x70616d2d726f736e;

Result cuTensorMapEncodeTiled(struct TensorMap* map, int type, unsigned rank, Address address, const Address* lens,
                              const Address* strides, const unsigned* box, const unsigned* steps, int interleave,
                              int swizzle, int promotion, int fill) {
    REQUIRE((Address)map % 64 == 0 && type == 9 && rank >= 2 && rank <= 5 && address % 16 == 0);
    REQUIRE(interleave == 0 && swizzle == 3 && promotion >= 0 && promotion <= 3 && fill == 0);
    REQUIRE(box[0] * 2 == 128 && steps[0] == 1);
    Address len = lens[0] * 2;
    for (unsigned i = 0; i < rank; i++) {
        REQUIRE(lens[i] > 0 && lens[i] <= 1ull << 32 && box[i] > 0 && box[i] <= 256 && steps[i] == 1);
        if (i == 0) continue;
        REQUIRE(strides[i - 1] % 16 == 0 && strides[i - 1] < 1ull << 40 && strides[i - 1] >= lens[0] * 2);
        len += (lens[i] - 1) * strides[i - 1];
    }
    REQUIRE(memory_at(address, len));
    return *map = (struct TensorMap){.mark = MAP_MARK, .address = address, .len = len}, 0;
}

enum { CLUSTER = 4, STREAM_SERIALIZATION = 6, MAX_CLUSTER = 8 };
struct LaunchAttribute {
    int id;
    char pad[4];
    union {
        int value;
        unsigned blocks[3];
        char space[64];
    };
};
struct LaunchConfig {
    unsigned x, y, z, threads, threads_y, threads_z, shared_bytes;
    void* stream;
    struct LaunchAttribute* attributes;
    unsigned num_attributes;
};

Result cuLaunchKernelEx(const struct LaunchConfig* launch, void* function, void** parameters, void** more) {
    IN_CONTEXT;
    REQUIRE(lives(function, FUNCTION) && lives(launch->stream, STREAM));
    struct Object* kernel = function;
    REQUIRE(lives(kernel->base, MODULE));
    REQUIRE(launch->x > 0 && launch->x < 1u << 31 && launch->y > 0 && launch->y < 65536 && launch->z > 0 && launch->z < 65536);
    REQUIRE(launch->threads > 0 && launch->threads <= 1024 && launch->threads % 32 == 0);
    REQUIRE(launch->threads_y == 1 && launch->threads_z == 1);
    REQUIRE(launch->shared_bytes <= kernel->len && parameters && parameters[0] && !more);
    int is_cluster = 0;
    for (unsigned i = 0; i < launch->num_attributes; i++) {
        const struct LaunchAttribute* attribute = &launch->attributes[i];
        switch (attribute->id) {
            case STREAM_SERIALIZATION: REQUIRE(attribute->value == 1); break;
            case CLUSTER:
                REQUIRE(attribute->blocks[0] > 0 && attribute->blocks[0] <= MAX_CLUSTER);
                REQUIRE(attribute->blocks[1] == 1 && attribute->blocks[2] == 1);
                REQUIRE(launch->x % attribute->blocks[0] == 0);
                is_cluster = 1;
                break;
            default: FAIL("attribute %d", attribute->id);
        }
    }
    REQUIRE(is_cluster == kernel->takes_maps);
    if (kernel->takes_maps) {
        const struct TensorMap* maps = parameters[0];
        REQUIRE((Address)maps % 64 == 0);
        for (int i = 0; i < 2; i++) REQUIRE(maps[i].mark == MAP_MARK && memory_at(maps[i].address, maps[i].len));
        __atomic_add_fetch(&num_cluster_launches, 1, __ATOMIC_RELAXED);
    }
    return __atomic_add_fetch(&num_launches, 1, __ATOMIC_RELAXED), 0;
}

Result cuStreamBeginCapture_v2(void* stream, int mode) {
    IN_CONTEXT;
    REQUIRE(lives(stream, STREAM) && !capturing && mode == 2);
    return capturing = stream, 0;
}
Result cuStreamEndCapture(void* stream, void** graph) {
    IN_CONTEXT;
    REQUIRE(stream == capturing);
    return capturing = NULL, *graph = add(GRAPH, NULL, 0), 0;
}
Result cuGraphInstantiateWithFlags(void** executable, void* graph, Address flags) {
    IN_CONTEXT;
    REQUIRE(lives(graph, GRAPH) && flags == 0);
    return *executable = add(EXECUTABLE, NULL, 0), 0;
}
Result cuGraphDestroy(void* graph) { return end(graph, GRAPH), 0; }
Result cuGraphExecDestroy(void* executable) { return end(executable, EXECUTABLE), 0; }
Result cuGraphLaunch(void* executable, void* stream) {
    IN_CONTEXT;
    REQUIRE(lives(executable, EXECUTABLE) && lives(stream, STREAM) && !capturing);
    return __atomic_add_fetch(&num_graph_launches, 1, __ATOMIC_RELAXED), 0;
}
