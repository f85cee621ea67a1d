// A stand-in for libcuda.so.1 with one device that splits like an H200, for tests without a GPU.
//
// It holds cuda-bindings to the real ABI: structures come from cuda.h, and what the driver would refuse is refused.
// Only what green contexts need is here; every other function returns CUDA_ERROR_NOT_SUPPORTED.
//   cc -shared -fPIC -I<dir of cuda.h> -o libcuda.so.1 fake_libcuda.c

#include <cuda.h>
#include <stdlib.h>
#include <string.h>

#define NUM_SMS 132
#define ALIGNMENT 8

struct CUdevResourceDesc_st {
  CUdevResource resource;
};
struct CUgreenCtx_st {
  CUdevResource resource;
  int num_streams;
};
struct CUstream_st {
  CUgreenCtx context;
};

static int live_contexts, live_streams;

int fake_live_contexts(void) { return live_contexts; }
int fake_live_streams(void) { return live_streams; }

static CUdevResource make_resource(int first, int count) {
  CUdevResource resource;
  memset(&resource, 0, sizeof(resource));
  resource.type = count ? CU_DEV_RESOURCE_TYPE_SM : CU_DEV_RESOURCE_TYPE_INVALID;
  resource.sm.smCount = count;
  resource._internal_padding[0] = (unsigned char)first;
  resource._internal_padding[1] = (unsigned char)count;
  return resource;
}

static CUresult fake_init(unsigned int flags) { return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }

static CUresult fake_device_get(CUdevice* device, int ordinal) {
  if (ordinal != 0) return CUDA_ERROR_INVALID_DEVICE;
  *device = 0;
  return CUDA_SUCCESS;
}

static CUresult fake_device_get_attribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  if (device != 0) return CUDA_ERROR_INVALID_DEVICE;
  if (attribute != CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) return CUDA_ERROR_INVALID_VALUE;
  *value = 9;
  return CUDA_SUCCESS;
}

static CUresult fake_device_get_dev_resource(CUdevice device, CUdevResource* resource, CUdevResourceType type) {
  if (device != 0) return CUDA_ERROR_INVALID_DEVICE;
  if (type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
  *resource = make_resource(0, NUM_SMS);
  return CUDA_SUCCESS;
}

static CUresult fake_split_by_count(CUdevResource* result, unsigned int* num_groups, const CUdevResource* input,
                                    CUdevResource* remainder, unsigned int flags, unsigned int min_count) {
  if (input->type != CU_DEV_RESOURCE_TYPE_SM || input->sm.smCount != NUM_SMS) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
  if (flags != 0 || *num_groups != 1 || min_count > NUM_SMS) return CUDA_ERROR_INVALID_VALUE;
  unsigned int granted = (min_count + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  if (granted < ALIGNMENT) granted = ALIGNMENT;
  // Not the H200's rule, but ours to survive: a rung that the driver refuses.
  if (granted > 120) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
  if (result) result[0] = make_resource(0, (int)granted);
  if (remainder) *remainder = make_resource((int)granted, (int)(NUM_SMS - granted));
  return CUDA_SUCCESS;
}

static CUresult fake_generate_desc(CUdevResourceDesc* descriptor, CUdevResource* resources, unsigned int count) {
  if (count != 1 || resources[0].type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
  *descriptor = malloc(sizeof(**descriptor));
  (*descriptor)->resource = resources[0];
  return CUDA_SUCCESS;
}

static CUresult fake_green_ctx_create(CUgreenCtx* context, CUdevResourceDesc descriptor, CUdevice device,
                                      unsigned int flags) {
  if (device != 0 || flags != CU_GREEN_CTX_DEFAULT_STREAM) return CUDA_ERROR_INVALID_VALUE;
  *context = calloc(1, sizeof(**context));
  (*context)->resource = descriptor->resource;
  ++live_contexts;
  return CUDA_SUCCESS;
}

static CUresult fake_green_ctx_destroy(CUgreenCtx context) {
  // The real one leaves streams detached; destroying them first is our rule, so breaking it is an error here.
  if (context->num_streams) return CUDA_ERROR_INVALID_CONTEXT;
  free(context);
  --live_contexts;
  return CUDA_SUCCESS;
}

static CUresult fake_green_ctx_stream_create(CUstream* stream, CUgreenCtx context, unsigned int flags, int priority) {
  if (flags != CU_STREAM_NON_BLOCKING || priority > 0) return CUDA_ERROR_INVALID_VALUE;
  *stream = malloc(sizeof(**stream));
  (*stream)->context = context;
  ++context->num_streams;
  ++live_streams;
  return CUDA_SUCCESS;
}

static CUresult fake_stream_destroy(CUstream stream) {
  --stream->context->num_streams;
  --live_streams;
  free(stream);
  return CUDA_SUCCESS;
}

// First SM and number of SMs of a stream, for the test.
int fake_stream_first_sm(CUstream stream) { return (unsigned char)stream->context->resource._internal_padding[0]; }
int fake_stream_num_sms(CUstream stream) { return (unsigned char)stream->context->resource._internal_padding[1]; }

static CUresult not_supported(void) { return CUDA_ERROR_NOT_SUPPORTED; }

CUresult cuGetProcAddress_v2(const char* symbol, void** function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult* status) {
  static const struct {
    const char* name;
    void* function;
  } table[] = {
      {"cuInit", (void*)fake_init},
      {"cuDeviceGet", (void*)fake_device_get},
      {"cuDeviceGetAttribute", (void*)fake_device_get_attribute},
      {"cuDeviceGetDevResource", (void*)fake_device_get_dev_resource},
      {"cuDevSmResourceSplitByCount", (void*)fake_split_by_count},
      {"cuDevResourceGenerateDesc", (void*)fake_generate_desc},
      {"cuGreenCtxCreate", (void*)fake_green_ctx_create},
      {"cuGreenCtxDestroy", (void*)fake_green_ctx_destroy},
      {"cuGreenCtxStreamCreate", (void*)fake_green_ctx_stream_create},
      {"cuStreamDestroy", (void*)fake_stream_destroy},
      {"cuGetProcAddress", (void*)cuGetProcAddress_v2},
  };
  (void)version;
  (void)flags;
  if (status) *status = CU_GET_PROC_ADDRESS_SUCCESS;
  *function = (void*)not_supported;
  for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); ++i) {
    if (strcmp(symbol, table[i].name) == 0) *function = table[i].function;
  }
  return CUDA_SUCCESS;
}
