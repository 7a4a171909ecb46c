# Builds a consumer against an installed tree: this build's flavour of the library as it stands, the
# other flavour built for the purpose. Not under the sanitizers: a consumer would have to be built
# with them too, which is not what a user of the package does, and the code is the same.
if(FLASHDSA_SANITIZE)
  return()
endif()

find_package(Python3 REQUIRED COMPONENTS Interpreter)

foreach(flavour static shared)
  set(arguments --flavour ${flavour} --work ${CMAKE_CURRENT_BINARY_DIR}/install/${flavour}
      --cmake ${CMAKE_COMMAND} --compiler ${CMAKE_CXX_COMPILER} --version ${PROJECT_VERSION}
      --launcher=${CMAKE_CXX_COMPILER_LAUNCHER} --build-type ${CMAKE_BUILD_TYPE})
  # The same options as here, so that ccache has the objects already.
  foreach(option FLASHDSA_WERROR FLASHDSA_CUDA CMAKE_CUDA_ARCHITECTURES)
    list(APPEND arguments --define=-D${option}=${${option}})
  endforeach()
  if((flavour STREQUAL shared AND BUILD_SHARED_LIBS)
     OR (flavour STREQUAL static AND NOT BUILD_SHARED_LIBS))
    list(APPEND arguments --build ${PROJECT_BINARY_DIR})
  endif()
  add_test(NAME install.${flavour}
           COMMAND Python3::Interpreter ${CMAKE_CURRENT_LIST_DIR}/check_install.py ${arguments})
  set_tests_properties(install.${flavour} PROPERTIES TIMEOUT 900)
endforeach()
