# The command on files, judged by the NumPy oracle: one test for every backend and group of cases.

set(Python3_FIND_UNVERSIONED_NAMES FIRST)  # the python3 of the PATH
find_package(Python3 REQUIRED COMPONENTS Interpreter)
execute_process(COMMAND ${Python3_EXECUTABLE} -c "import numpy"
                RESULT_VARIABLE numpy_missing OUTPUT_QUIET ERROR_QUIET)
if(numpy_missing)
  message(FATAL_ERROR "The conformance tests need NumPy, and ${Python3_EXECUTABLE} cannot import "
                      "it: install python3-numpy, name another interpreter with "
                      "-DPython3_EXECUTABLE=, or build without -DFLASHDSA_TESTS=ON.")
endif()

set(conformance_backends reference cpu)
set(conformance_timeout 60)  # seconds for one call of the command
if(FLASHDSA_SANITIZE)
  set(conformance_backends cpu)  # the reference is plain loops; the C++ tests run it here
  set(conformance_timeout 600)
endif()

foreach(backend IN LISTS conformance_backends)
  foreach(group metadata topk attend run badfile cli)
    set(name conformance.${backend}.${group})
    add_test(NAME ${name}
             COMMAND Python3::Interpreter ${CMAKE_CURRENT_LIST_DIR}/oracle/run_cases.py
                     --bin $<TARGET_FILE:flashdsa_command> --backend ${backend} --only ${group}
                     --timeout ${conformance_timeout} --strict)
    set_tests_properties(${name} PROPERTIES TIMEOUT 3600 ENVIRONMENT "FLASHDSA_CHECK=")
  endforeach()
endforeach()

# The judge itself: it must refuse wrong answers.
add_test(NAME conformance.checker
         COMMAND Python3::Interpreter -m unittest -v test_checker
         WORKING_DIRECTORY ${CMAKE_CURRENT_LIST_DIR})
