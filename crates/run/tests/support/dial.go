// Dials a server from many goroutines at once and prints its answers.
package main

import (
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"sync"
)

func main() {
	count, _ := strconv.Atoi(os.Args[2])
	var all sync.WaitGroup
	for i := 0; i < count; i++ {
		all.Add(1)
		go func() {
			defer all.Done()
			stream, err := net.Dial("tcp", os.Args[1]+":8080")
			if err != nil {
				fmt.Println(err)
				return
			}
			defer stream.Close()
			answer, _ := io.ReadAll(stream)
			fmt.Println(string(answer))
		}()
	}
	all.Wait()
}
