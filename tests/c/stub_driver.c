// SPDX-License-Identifier: Apache-2.0
// A CUDA driver (libcuda.so.1) without a GPU: what a machine answers is set by environment
// variables. It counts what is retained, loaded and launched, so that leaks show.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  SUCCESS = 0,
  NO_DEVICE = 100,
  NO_BINARY_FOR_GPU = 209,
  NOT_FOUND = 500,
  MAJOR = 75,
  MINOR = 76,
  SM_COUNT = 16,
  SHARED_OPTIN = 97,
};

static int retained, loaded, pushed, launched;

static int setting(const char *name, int otherwise) {
  const char *text = getenv(name);
  return text ? atoi(text) : otherwise;
}

int cuDriverGetVersion(int *version) {
  *version = setting("STUB_VERSION", 13000);
  return SUCCESS;
}
int cuInit(unsigned flags) {
  (void)flags;
  return setting("STUB_INIT", SUCCESS);
}
int cuDeviceGetCount(int *count) {
  *count = setting("STUB_DEVICES", 1);
  return SUCCESS;
}
int cuDeviceGet(int *device, int index) {
  *device = index;
  return SUCCESS;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  switch (attribute) {
    case MAJOR: *value = setting("STUB_CAPABILITY", 90) / 10; break;
    case MINOR: *value = setting("STUB_CAPABILITY", 90) % 10; break;
    case SM_COUNT: *value = 132; break;
    case SHARED_OPTIN: *value = setting("STUB_SHARED", 232448); break;
    default: return 1;
  }
  return SUCCESS;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
  (void)device;
  *context = &retained;
  retained++;
  return SUCCESS;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
  (void)device;
  retained--;
  return SUCCESS;
}
int cuCtxGetCurrent(void **context) {
  *context = pushed ? &retained : NULL;
  return SUCCESS;
}
int cuCtxPushCurrent_v2(void *context) {
  if (context != &retained) return 201;
  pushed++;
  return SUCCESS;
}
int cuCtxPopCurrent_v2(void **context) {
  *context = &retained;
  pushed--;
  return SUCCESS;
}
int cuModuleLoadData(void **module, const void *image) {
  // the magic number of a fatbin, and the alignment that the driver wants
  unsigned magic;
  memcpy(&magic, image, sizeof magic);
  if (magic != 0xba55ed50u || (size_t)image % 16 != 0) return 200;
  if (loaded == setting("STUB_FAIL_AT_MODULE", -1)) return NO_BINARY_FOR_GPU;
  loaded++;
  *module = &loaded;
  return SUCCESS;
}
int cuModuleUnload(void *module) {
  (void)module;
  if (!pushed) return 201;
  loaded--;
  return SUCCESS;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
  (void)module;
  if (strncmp(name, "ddt_", 4) != 0) return NOT_FOUND;
  *function = &launched;
  return SUCCESS;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) {
  (void)attribute, (void)function;
  *value = 0;
  return SUCCESS;
}
int cuFuncSetAttribute(void *function, int attribute, int value) {
  (void)function, (void)attribute, (void)value;
  return SUCCESS;
}
int cuLaunchKernelEx(const void *config, void *function, void **params, void **extra) {
  (void)function, (void)params, (void)extra;
  const unsigned *grid = (const unsigned *)config;
  if (!pushed || !grid[0] || !grid[1] || !grid[2]) return 1;
  launched++;
  return SUCCESS;
}
int cuGetErrorName(int error, const char **text) {
  *text = error == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE" : error == NO_BINARY_FOR_GPU ? "CUDA_ERROR_NO_BINARY_FOR_GPU" : NULL;
  return *text ? SUCCESS : 1;
}
int cuGetErrorString(int error, const char **text) {
  (void)error;
  *text = NULL;
  return 1;
}

// For the tests: 1000 * contexts + 100 * (pushed contexts) + modules that are still held; launches.
int stub_held(void) { return 1000 * retained + 100 * pushed + loaded; }
int stub_launched(void) { return launched; }
