// SPDX-License-Identifier: Apache-2.0
// Prints the status and message of making a CUDA context; tests/c/run.sh compares it under several drivers.
#define _GNU_SOURCE
#include <dlfcn.h>

#include "check.h"

// What the stub driver still holds, 0 with any other driver.
static int held(void) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  int (*ask)(void) = NULL;
  if (driver) *(void **)&ask = dlsym(driver, "stub_held");
  return ask ? ask() : 0;
}

int main(int argc, char **argv) {
  ddt_context_params params;
  memset(&params, 0, sizeof params);
  params.struct_size = sizeof params;
  params.abi_version = DDT_ABI_VERSION;
  params.device = DDT_DEVICE_CUDA;
  params.device_index = argc > 1 ? atoi(argv[1]) : 0;
  ddt_context *context = NULL, *second = NULL;
  ddt_status status = ddt_context_create(&params, &context);
  char text[512];
  CHECK(ddt_last_error(text, sizeof text, NULL) == DDT_OK || status == DDT_OK);
  printf("%s %s\n", ddt_status_name(status), status == DDT_OK ? "" : text);
  if (status == DDT_OK) {
    CHECK(ddt_context_create(&params, &second) == DDT_OK);
    ddt_context_free(second);
    ddt_context_free(context);
  }
  CHECK(held() == 0);
  // the CPU backend works whatever the driver says
  ddt_context_free(cpu_context());
  return 0;
}
