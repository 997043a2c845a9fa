// Command pause does nothing until it is told to end. It is the process that holds a pod's namespaces, and also the
// first process of the local node's own namespaces. In both places it is process 1, so it must reap orphans.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGINT, syscall.SIGTERM)

	child := make(chan os.Signal, 1)
	signal.Notify(child, syscall.SIGCHLD)

	for {
		select {
		case <-end:
			return
		case <-child:
			reap()
		}
	}
}

// reap collects every child that has ended. One SIGCHLD may stand for several of them.
func reap() {
	for {
		pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
		if err == syscall.EINTR {
			continue
		}
		if pid <= 0 || err != nil {
			return
		}
	}
}
