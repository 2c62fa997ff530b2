/* The slot of lora_server/wire/slot.py, for code that runs on a device. A test compares the two. */
#ifndef LORA_SERVER_SLOT_H
#define LORA_SERVER_SLOT_H
#ifdef __CUDACC_RTC__ /* NVRTC has no headers; NVSHMEM's bring these types */
#if !NVSHMEM
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#endif
#else
#include <stdint.h>
#endif

#define LORA_REQUEST_MAGIC 0x51524F4Cu
#define LORA_RESPONSE_MAGIC 0x50524F4Cu
#define LORA_SLOT_VERSION 1
#define LORA_HEADER_BYTES 128
#define LORA_ALIGN 64
#define LORA_SIGNAL_LINE_BYTES 128

enum { LORA_DECODE = 0, LORA_PREFILL = 1 };
enum { LORA_HAS_IN_MAP = 1, LORA_HAS_OUT_MAP = 2, LORA_WAITS_FOR_WEIGHTS = 4 };
/* e4m3: float row_scale[num_rows] before the rows, 16-byte aligned in a request, behind the header in a response */
enum { LORA_FLOAT32 = 0, LORA_BFLOAT16 = 1, LORA_FLOAT16 = 2, LORA_E4M3 = 3 };
enum { LORA_OK = 0, LORA_FAILED = 1 };

struct lora_request {
    uint32_t magic;
    uint16_t version;
    uint8_t step_class;
    uint8_t flags;
    uint32_t client;
    uint32_t epoch;
    uint64_t seq;
    uint32_t slot;
    uint32_t layer;
    uint32_t projection;
    uint32_t dtype;
    uint32_t num_rows;
    uint32_t num_entries;
    uint32_t num_segments;
    uint32_t num_out_rows;
    uint32_t in_begin;
    uint32_t in_end;
    uint32_t num_windows;
    uint32_t out_windows[6]; /* begin, end of up to three windows of output rows */
    uint32_t reserved;
    uint64_t payload_bytes;
    uint64_t budget_us; /* a duration: clocks of two hosts do not compare */
    uint64_t pushed_ns;
};

struct lora_response {
    uint32_t magic;
    uint16_t version;
    uint16_t status;
    uint32_t client;
    uint32_t epoch;
    uint64_t seq;
    uint32_t slot;
    uint32_t dtype;
    uint32_t num_rows;
    uint32_t width;
    uint64_t payload_bytes;
    uint64_t received_ns;
    uint64_t started_ns;
    uint64_t done_ns;
};

struct lora_segment {
    uint32_t handle;
    uint32_t expert;
    uint32_t first;
    uint32_t num_entries;
};

/* A region: lines of 128 bytes (request signal, response signal, parking word, geometry, bell word), then from
 * LORA_PAGE_BYTES on `depth` request slots and `depth` response slots. The slot of a step is seq % depth. */
#define LORA_PAGE_BYTES 4096
#define LORA_REGION_MAGIC 0x47524F4Cu
struct lora_geometry {
    uint32_t magic;
    uint32_t version;
    uint32_t depth;
    uint32_t table_bytes; /* of a request slot: header, segments and maps of any step */
    uint64_t request_bytes;
    uint64_t response_bytes;
    uint64_t widest; /* dtype of the widest rows that slots have room for */
};

/* A signal word is set, never added to, by one writer: 16 bits of epoch, 48 of seq. */
#define LORA_SIGNAL(epoch, seq) ((((uint64_t)(epoch) & 0xFFFF) << 48) | (uint64_t)(seq))
#define LORA_SIGNAL_EPOCH(word) ((uint32_t)((uint64_t)(word) >> 48))
#define LORA_SIGNAL_SEQ(word) ((uint64_t)(word) & 0xFFFFFFFFFFFF)
#endif
